package terminal

import "strings"

// BreakCommand breaks a command into lines of at most the given columns, at spaces outside quotes.
// All lines except the last end with a backslash, so that users can paste the command. A remark
// without room gets a line of its own.
func BreakCommand(command string, columns int) []string {
	if Columns(command) <= columns {
		return []string{command}
	}
	remark := ""
	if at := strings.Index(command, " #"); at >= 0 {
		command, remark = strings.TrimRight(command[:at], " "), strings.TrimSpace(command[at:])
	}
	var lines []string
	start := command[:len(command)-len(strings.TrimLeft(command, " "))] // a command in a loop is indented
	line, indent := "", start
	for _, word := range shellWords(command) {
		switch {
		case line == "":
			line = word
		case Columns(indent+line)+1+Columns(word)+2 > columns:
			lines = append(lines, indent+line+" \\")
			line, indent = word, start+"  "
		default:
			line += " " + word
		}
	}
	// The last line has no backslash, so its last word may have been broken off unnecessarily.
	lines = append(lines, indent+line)
	if remark != "" {
		for _, words := range WrapText(strings.TrimPrefix(remark, "# "), columns-2-len(start)) {
			lines = append(lines, start+"# "+words)
		}
	}
	return lines
}

// shellWords splits a command at spaces outside quotes.
func shellWords(command string) (words []string) {
	var quote rune
	var word strings.Builder
	for _, r := range command {
		switch {
		case quote == 0 && r == ' ':
			if word.Len() > 0 {
				words = append(words, word.String())
				word.Reset()
			}
			continue
		case quote == 0 && (r == '\'' || r == '"'):
			quote = r
		case r == quote:
			quote = 0
		}
		word.WriteRune(r)
	}
	if word.Len() > 0 {
		words = append(words, word.String())
	}
	return words
}
