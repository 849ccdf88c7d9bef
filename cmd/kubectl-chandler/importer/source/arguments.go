package source

import (
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
)

// A file of arguments or environment variables alone is read as a container with these fields.
const (
	ArgsField = "args"
	EnvField  = "env"
)

// programWord matches the beginning of a command line that starts a plugin.
var programWord = regexp.MustCompile(`(?m)\A(?:\s*#.*\n|\s*\n)*\s*(?:\$\s+)?(?:sudo\s+)?(?:--?[a-zA-Z]|\S*(?:device-plugin|deviceplugin|device-dp|_plugin|gpushare)\S*\s+-|(?:docker|podman|nerdctl)\s+run\b|helm\s+(?:install|upgrade|template)\b)`)

// looksLikeArguments reports whether a text is a command line or a list of flags.
func looksLikeArguments(text string) bool {
	return programWord.MatchString(text) && !strings.HasPrefix(strings.TrimSpace(text), "---")
}

var variableLine = regexp.MustCompile(`^\s*(?:export\s+|-e\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$`)

// looksLikeVariables reports whether all lines of a text are environment variables, NAME=value.
func looksLikeVariables(text string) bool {
	found := false
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if !variableLine.MatchString(line) {
			return false
		}
		found = true
	}
	return found
}

// variablesOf returns a container with the environment variables of a text.
func variablesOf(file, text string) Value {
	env := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	number := 0
	for line := range strings.Lines(text) {
		number++
		m := variableLine.FindStringSubmatch(strings.TrimRight(line, "\n"))
		if m == nil {
			continue
		}
		words := SplitWords(m[2], number)
		said := ""
		if len(words) > 0 {
			said = words[0].Value
		}
		env.Content = append(env.Content, yamlnode.NewObject(number, "name", yamlnode.NewScalar(m[1], number), "value", yamlnode.NewScalar(said, number)))
	}
	return Value{Node: yamlnode.NewObject(1, EnvField, env), File: file}
}

// prompt matches the shell prompt or sudo before commands in documentation.
var prompt = regexp.MustCompile(`(?m)^\s*\$\s+(?:sudo\s+)?|\A\s*sudo\s+`)

// argumentsOf returns a container with the arguments of a text.
func argumentsOf(file, text string) Value {
	args := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Line: 1}
	args.Content = SplitWords(prompt.ReplaceAllString(text, ""), 1)
	if v, ok := runOf(args.Content); ok {
		return Value{Node: v, File: file}
	}
	return Value{Node: yamlnode.NewObject(1, ArgsField, args), File: file}
}

// runOf returns the container that a docker, podman or nerdctl run command starts. The words before
// the image are options of that command; only the environment variables among them are kept.
func runOf(words []*yaml.Node) (*yaml.Node, bool) {
	if len(words) < 2 || !slices.Contains([]string{"docker", "podman", "nerdctl"}, words[0].Value) || words[1].Value != "run" {
		return nil, false
	}
	image := func(sign string) int { // an image contains a slash, unlike the value of --name
		return slices.IndexFunc(words, func(word *yaml.Node) bool {
			return strings.Contains(word.Value, "plugin") && !strings.ContainsAny(word.Value[:1], "-/.") && strings.Contains(word.Value, sign)
		})
	}
	i := image("/")
	if i < 0 {
		i = image("")
	}
	if i < 0 {
		return nil, false
	}
	env := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	for j, word := range words[:i] {
		said, ok := strings.CutPrefix(word.Value, "--env=")
		if word.Value == "-e" || word.Value == "--env" {
			said, ok = words[j+1].Value, j+1 < i
		}
		if name, text, set := strings.Cut(said, "="); ok && set {
			env.Content = append(env.Content, yamlnode.NewObject(word.Line, "name", yamlnode.NewScalar(name, word.Line), "value", yamlnode.NewScalar(text, word.Line)))
		}
	}
	args := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Line: words[i].Line, Content: words[i+1:]}
	return yamlnode.NewObject(words[i].Line, "image", words[i], ArgsField, args, EnvField, env), true
}

// SplitWords splits a text as a shell does, except that a JSON object or list is always a single
// word.
func SplitWords(text string, line int) (words []*yaml.Node) {
	var word strings.Builder
	began, quote := 0, rune(0) // the line where a word begins, the quotes around the word
	end := func() {
		if began > 0 {
			words = append(words, yamlnode.NewScalar(word.String(), began))
		}
		word.Reset()
		began = 0
	}
	escaped := false
	for i := 0; i < len(text); i++ {
		c := rune(text[i])
		if strings.HasPrefix(text[i:], "\\\n") && quote != '\'' && !escaped { // the line continues
			line++
			i++
			continue
		}
		assigned := quote == 0 && !escaped && strings.HasSuffix(word.String(), "=")
		if (began == 0 || assigned) && (c == '{' || c == '[') {
			n := balancedLength(text[i:])
			if began == 0 {
				began = line
			}
			word.WriteString(text[i : i+n])
			end()
			line += strings.Count(text[i:i+n], "\n")
			i += n - 1
			continue
		}
		if c == '#' && began == 0 {
			for i < len(text) && text[i] != '\n' {
				i++
			}
			line++
			continue
		}
		space := c == ' ' || c == '\t' || c == '\n'
		if !space && began == 0 {
			began = line
		}
		switch {
		case escaped:
			word.WriteByte(text[i])
			escaped = false
		case c == '\\' && quote != '\'':
			escaped = true
		case quote != 0 && c == quote:
			quote = 0
		case quote != 0:
			word.WriteByte(text[i])
		case c == '\'' || c == '"':
			quote = c
		case space:
			end()
		default:
			word.WriteByte(text[i])
		}
		if c == '\n' {
			line++
		}
	}
	end()
	return words
}

// balancedLength returns the length of the JSON object or list at the beginning of a text.
func balancedLength(text string) int {
	depth := 0
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '"':
			i += quotedLength(text[i:]) - 1
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return len(text)
}

// An argument is a flag with its value, or a positional argument.
type argument struct {
	Name  string // without dashes, "" for a positional argument
	Value Value  // the flag's value; "true" for a flag without one
	Alone bool   // the flag has no value
}

// SplitArguments splits arguments into flags and their values. alone reports whether a flag takes
// no value, such as a boolean flag.
func SplitArguments(args []Value, alone func(name string) bool) []argument {
	var out []argument
	for i := 0; i < len(args); i++ {
		text := args[i].Node.Value
		bare := strings.TrimLeft(text, "-")
		if bare == text || bare == "" {
			out = append(out, argument{Value: args[i]})
			continue
		}
		name, said, assigned := strings.Cut(bare, "=")
		name = strings.TrimSpace(name)
		arg := argument{Name: name, Value: args[i]}
		arg.Value.Path += "--" + name // notes name an argument by its flag
		switch {
		case assigned:
			arg.Value.Node = yamlnode.NewScalar(said, args[i].Node.Line)
		case !alone(name) && i+1 < len(args) && !strings.HasPrefix(args[i+1].Node.Value, "-"):
			i++
			arg.Value = args[i]
			arg.Value.Path = "--" + name
		default:
			arg.Alone = true
			arg.Value.Node = yamlnode.NewScalar("true", args[i].Node.Line)
		}
		arg.Value.Path = "--" + name
		out = append(out, arg)
	}
	return out
}
