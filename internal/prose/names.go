package main

import (
	_ "embed"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"path"
	"regexp"
	"slices"
	"strings"
)

// usualNames are the single-word functions and methods of the standard library.
//
//go:embed usual.txt
var usualNames string

// nouns are the names of functions that return the named value.
//
//go:embed nouns.txt
var nouns string

// namedFunc is a function or method of Go.
type namedFunc struct {
	file     string
	line     int
	receiver string // "" for a function
	name     string
}

// singleWord matches the names that consist of one word.
var singleWord = regexp.MustCompile(`^(?:[A-Z]?[a-z0-9]+|[A-Z]+)$`)

// readNames returns the functions, and the exported methods, whose names are one word and
// neither usual nor a noun. A method of an interface does not count, because several types
// share its name. The files of tests, the module e2e and the families of devices do not
// count either: all families have functions with the same names, which their contract sets.
func readNames(files []string) ([]namedFunc, error) {
	var all []namedFunc
	interfaces := make(map[string]bool)
	err := readFiles(files, func(file string, data []byte) error {
		if !isCounted(file) {
			return nil
		}
		found, err := funcsOf(file, data, interfaces)
		all = append(all, found...)
		return err
	})
	return countedNames(all, interfaces), err
}

func isCounted(file string) bool {
	return path.Ext(file) == ".go" && !strings.HasSuffix(file, "_test.go") &&
		!strings.HasPrefix(file, "e2e/") && !strings.HasPrefix(file, "discovery/families/")
}

// funcsOf returns the functions and methods of a file, and adds the methods of the file's
// interfaces to interfaces.
func funcsOf(file string, data []byte, interfaces map[string]bool) ([]namedFunc, error) {
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, data, parser.SkipObjectResolution)
	if err != nil {
		return nil, fmt.Errorf("parse %s: %w", file, err)
	}
	ast.Inspect(parsed, func(n ast.Node) bool {
		if declared, ok := n.(*ast.InterfaceType); ok {
			for _, method := range declared.Methods.List {
				for _, name := range method.Names {
					interfaces[name.Name] = true
				}
			}
		}
		return true
	})
	var funcs []namedFunc
	for _, decl := range parsed.Decls {
		if f, ok := decl.(*ast.FuncDecl); ok {
			funcs = append(funcs, namedFunc{file, fset.Position(f.Name.Pos()).Line, receiverOf(f), f.Name.Name})
		}
	}
	return funcs, nil
}

// receiverOf returns the name of a method's type, "" for a function.
func receiverOf(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	receiver := f.Recv.List[0].Type
	for {
		switch r := receiver.(type) {
		case *ast.StarExpr:
			receiver = r.X
		case *ast.IndexExpr:
			receiver = r.X
		case *ast.IndexListExpr:
			receiver = r.X
		case *ast.Ident:
			return r.Name
		default:
			return "?"
		}
	}
}

// countedNames returns the functions and exported methods with a name of one word that is
// not in a list.
func countedNames(all []namedFunc, interfaces map[string]bool) []namedFunc {
	listed := parseWords(usualNames + nouns)
	return slices.DeleteFunc(all, func(f namedFunc) bool {
		isMethod := f.receiver != ""
		return !singleWord.MatchString(f.name) || f.name == "main" || f.name == "init" ||
			listed[strings.ToLower(f.name)] || isMethod && (interfaces[f.name] || !ast.IsExported(f.name))
	})
}

// parseWords returns the words of a list in lower case, without its comments.
func parseWords(list string) map[string]bool {
	words := make(map[string]bool)
	for line := range strings.Lines(list) {
		line, _, _ = strings.Cut(line, "#")
		for word := range strings.FieldsSeq(line) {
			words[strings.ToLower(word)] = true
		}
	}
	return words
}

// printNames prints the places of names.
func printNames(out io.Writer, names []namedFunc) {
	for _, n := range names {
		receiver := ""
		if n.receiver != "" {
			receiver = n.receiver + "."
		}
		fmt.Fprintf(out, "%s:%d: %s%s\n", n.file, n.line, receiver, n.name)
	}
}
