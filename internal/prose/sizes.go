package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
)

// The limits of the sizes of packages and types, without tests.
const (
	maxFiles   = 25
	maxLines   = 3000
	maxMethods = 40
)

// findOversized returns a line for each package and type above a limit. The files of tests and of
// the module e2e do not count.
func findOversized(files []string) (oversized []string, err error) {
	fileCounts, lineCounts, methodCounts := make(map[string]int), make(map[string]int), make(map[string]int)
	for _, file := range files {
		if path.Ext(file) != ".go" || strings.HasSuffix(file, "_test.go") || strings.HasPrefix(file, "e2e/") {
			continue
		}
		data, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		funcs, err := funcsOf(file, data, make(map[string]bool))
		if err != nil {
			return nil, err
		}
		dir := path.Dir(file)
		fileCounts[dir]++
		lineCounts[dir] += bytes.Count(data, []byte("\n"))
		for _, f := range funcs {
			if f.receiver != "" {
				methodCounts[dir+": type "+f.receiver]++
			}
		}
	}
	for _, count := range []struct {
		of   map[string]int
		unit string
		most int
	}{{fileCounts, "files", maxFiles}, {lineCounts, "lines", maxLines}, {methodCounts, "methods", maxMethods}} {
		for name, n := range count.of {
			if n > count.most {
				oversized = append(oversized, fmt.Sprintf("%s: %d %s, more than %d", name, n, count.unit, count.most))
			}
		}
	}
	slices.Sort(oversized)
	return oversized, nil
}
