package main

import (
	"bytes"
	"fmt"
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
	err = readFiles(files, func(file string, data []byte) error {
		if path.Ext(file) != ".go" || strings.HasSuffix(file, "_test.go") || strings.HasPrefix(file, "e2e/") {
			return nil
		}
		dir := path.Dir(file)
		fileCounts[dir]++
		lineCounts[dir] += bytes.Count(data, []byte("\n"))
		funcs, err := funcsOf(file, data, make(map[string]bool))
		for _, f := range funcs {
			if f.receiver != "" {
				methodCounts[dir+": type "+f.receiver]++
			}
		}
		return err
	})
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
	return oversized, err
}
