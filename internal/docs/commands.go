package docs

import (
	"fmt"
	"strings"
)

// Command is a command in a fenced block.
type Command struct {
	Line  int      // line number in the page
	Words []string // the arguments without quotes, as passed by the shell
	Piped bool     // standard input is the output of the previous command
}

// Commands returns the commands of a block. In a block of sh, all lines are commands. In other
// blocks, which also contain output, commands have the prompt "$ ".
func (b Block) Commands() ([]Command, error) {
	var all []Command
	line, text := b.Line, ""
	for physical := range strings.Lines(b.Text) {
		physical = strings.TrimRight(physical, "\n")
		if b.Lang != "sh" && text == "" {
			var prompt bool
			if physical, prompt = strings.CutPrefix(physical, "$ "); !prompt {
				line++
				continue
			}
		}
		if before, more := strings.CutSuffix(physical, `\`); more {
			text += before
			line++
			continue
		}
		commands, err := split(text + physical)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		for _, c := range commands {
			c.Line = line
			all = append(all, c)
		}
		line++
		text = ""
	}
	return all, nil
}

// split parses a line of sh into simple commands. It supports quotes, comments, pipes, lists
// and redirections, which is sufficient for the pages. Assignments before a command are
// omitted.
func split(line string) ([]Command, error) {
	var all []Command
	var now Command
	var word strings.Builder
	started, redirected := false, false
	end := func() {
		if started && !redirected {
			now.Words = append(now.Words, word.String())
		}
		if started {
			redirected = false
		}
		word.Reset()
		started = false
	}
	finish := func(pipe bool) {
		end()
		for len(now.Words) > 1 && isAssignment(now.Words[0]) {
			now.Words = now.Words[1:]
		}
		if len(now.Words) > 0 {
			all = append(all, now)
		}
		now = Command{Piped: pipe}
	}
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case c == '\'' || c == '"':
			length := strings.IndexByte(line[i+1:], c)
			if length < 0 {
				return nil, fmt.Errorf("a quote is not closed in %q", line)
			}
			word.WriteString(line[i+1 : i+1+length])
			started = true
			i += length + 1
		case c == '#' && !started:
			i = len(line)
		case c == ' ' || c == '\t':
			end()
		case c == '>' || c == '<':
			if word.String() != "2" {
				end()
			}
			word.Reset()
			started, redirected = false, true
		case c == '|' || c == '&' || c == ';':
			double := i+1 < len(line) && line[i+1] == c
			if double {
				i++
			}
			finish(c == '|' && !double)
		default:
			word.WriteByte(c)
			started = true
		}
	}
	finish(false)
	return all, nil
}

func isAssignment(word string) bool {
	name, _, ok := strings.Cut(word, "=")
	return ok && name == strings.ToUpper(name) && !strings.ContainsAny(name, "-/.")
}
