package importer

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzImport imports any text: there is no panic, and the result is a valid configuration.
func FuzzImport(f *testing.F) {
	entries, err := os.ReadDir("testdata")
	if err != nil {
		f.Fatal(err)
	}
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), ".golden") || entry.Name() == "fuzz" {
			continue
		}
		for _, file := range filesOf(f, filepath.Join("testdata", entry.Name())) {
			f.Add(file.Data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<14 {
			return
		}
		_, _, _ = read(t, Options{Only: true}, File{Name: "fuzz", Data: data})
	})
}
