package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"
)

// text is a line of prose: of a page, or of a comment in Go.
type text struct {
	file    string
	line    int
	comment bool
	words   string
}

// readFiles calls read for each file with its content. A file that git tracks and that was removed
// is left out.
func readFiles(files []string, read func(file string, data []byte) error) error {
	for _, file := range files {
		data, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if err := read(file, data); err != nil {
			return err
		}
	}
	return nil
}

// readTexts returns the prose of Go files and pages.
func readTexts(files []string) ([]text, error) {
	var texts []text
	err := readFiles(files, func(file string, data []byte) error {
		if path.Ext(file) == ".md" {
			texts = append(texts, pageTexts(file, string(data))...)
			return nil
		}
		comments, err := commentTexts(file, data)
		texts = append(texts, comments...)
		return err
	})
	return texts, err
}

// quoted matches inline code, which is not prose.
var quoted = regexp.MustCompile("`[^`]*`")

// pageTexts returns the lines of a page outside fenced code blocks.
func pageTexts(file, page string) []text {
	var texts []text
	fenced := false
	for i, line := range strings.Split(page, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
			continue
		}
		if !fenced {
			texts = append(texts, text{file: file, line: i + 1, words: quoted.ReplaceAllString(line, "")})
		}
	}
	return texts
}

// directive matches comments that are read by tools, such as //go:embed.
var directive = regexp.MustCompile(`^//[a-z]+:[^ ]|^//nolint\b`)

// commentTexts returns the lines of a Go file's comments.
func commentTexts(file string, data []byte) ([]text, error) {
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, data, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, fmt.Errorf("parse %s: %w", file, err)
	}
	var texts []text
	for _, group := range parsed.Comments {
		for _, comment := range group.List {
			texts = append(texts, commentLines(file, fset, comment)...)
		}
	}
	return texts, nil
}

func commentLines(file string, fset *token.FileSet, comment *ast.Comment) []text {
	if directive.MatchString(comment.Text) {
		return nil
	}
	var texts []text
	first := fset.Position(comment.Pos()).Line
	for i, line := range strings.Split(comment.Text, "\n") {
		texts = append(texts, text{file: file, line: first + i, comment: true, words: line})
	}
	return texts
}
