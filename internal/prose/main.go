// Command prose counts, in the comments and pages of this project, the words that
// make them hard to read, and compares the figures with the limits in words.txt. It also
// counts the names of Go functions and methods that are a single word without an object, and
// lists packages and types that are too large.
//
// Without flags it prints one line for each figure and exits with status 1 if a
// figure exceeds its limit. It reads the files that git tracks in the current
// directory, and changes nothing.
package main

import (
	_ "embed"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

//go:embed words.txt
var wordList string

func main() {
	list := flag.String("list", "", "print the places of one figure instead, such as persons or names")
	folders := flag.Bool("folders", false, "print the figures of each folder as well")
	flag.Parse()
	if err := run(os.Stdout, *list, *folders, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run prints the figures of the tracked files below the given paths.
func run(out io.Writer, list string, folders bool, paths []string) error {
	limits, err := parseLimits(wordList)
	if err != nil {
		return err
	}
	files, err := trackedFiles(paths)
	if err != nil {
		return err
	}
	names, err := readNames(files)
	if err != nil {
		return err
	}
	if list == "names" {
		printNames(out, names)
		return nil
	}
	texts, err := readTexts(files)
	if err != nil {
		return err
	}
	if list != "" {
		return printPlaces(out, limits.figures, texts, list)
	}
	if folders {
		printFolders(out, limits.figures, texts)
	}
	exceeded := printFigures(out, limits.figures, texts)
	fmt.Fprintf(out, "%-12s %18s\n", "names", fmt.Sprintf("%d (%d)", len(names), limits.names))
	if len(names) > limits.names {
		printNames(out, names)
		exceeded = append(exceeded, "names")
	}
	oversized, err := findOversized(files)
	if err != nil {
		return err
	}
	if len(oversized) > 0 && len(paths) == 0 {
		return fmt.Errorf("too large:\n%s", strings.Join(oversized, "\n"))
	}
	if len(exceeded) > 0 && len(paths) == 0 {
		return fmt.Errorf("above the limits of internal/prose/words.txt: %s", strings.Join(exceeded, ", "))
	}
	return nil
}

// trackedFiles returns the Go files and pages that git tracks below the given paths.
func trackedFiles(paths []string) ([]string, error) {
	arguments := append([]string{"ls-files", "-z", "--"}, paths...)
	output, err := exec.Command("git", arguments...).Output()
	if err != nil {
		return nil, fmt.Errorf("list files: git ls-files: %w", err)
	}
	var files []string
	for file := range strings.SplitSeq(string(output), "\x00") {
		if strings.Contains(file, "testdata/") {
			continue
		}
		if strings.HasSuffix(file, ".go") || strings.HasSuffix(file, ".md") {
			files = append(files, file)
		}
	}
	return files, nil
}
