package kubectl

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"chandler.dev/internal/redact"
	"chandler.dev/internal/terminal"
)

// A collection is the content of a report. Its archive is always redacted.
type collection struct {
	redact  *redact.Redactor
	name    string
	time    time.Time
	files   []collected
	lines   []line
	missing []string
}

// line is a line of the report's summary.
type line struct{ title, text string }

// kind determines how a file is redacted.
type kind int

const (
	kindText kind = iota // also JSON
	kindHost             // a recorded host
)

type collected struct {
	name string
	kind kind
	data []byte
}

// add adds a file, and registers the identities in it for redaction.
func (c *collection) add(name string, k kind, data []byte) {
	if k == kindHost {
		c.redact.LearnHost(data)
	} else {
		c.redact.LearnIdentities(data)
	}
	c.files = append(c.files, collected{name, k, data})
}

// addJSON adds an object.
func (c *collection) addJSON(name string, object any) {
	data, err := json.MarshalIndent(object, "", "  ")
	if err != nil {
		c.addMissing(name, err.Error())
		return
	}
	c.add(name, kindText, append(data, '\n'))
}

// addLine notes a part that was collected or left out.
func (c *collection) addLine(title, text string) { c.lines = append(c.lines, line{title, text}) }

// addMissing notes a part that could not be collected.
func (c *collection) addMissing(what, why string) {
	c.missing = append(c.missing, fmt.Sprintf("%s: %s", what, why))
}

// writeArchive returns all files, redacted, in one archive. Redaction waits until then, because an
// identity from one file can occur in every other.
func (c *collection) writeArchive() ([]byte, error) {
	var out bytes.Buffer
	zip := gzip.NewWriter(&out)
	archive := tar.NewWriter(zip)
	put := func(name string, data []byte) error {
		err := archive.WriteHeader(&tar.Header{Name: c.name + "/" + name, Mode: 0o600, Size: int64(len(data)), ModTime: c.time, Typeflag: tar.TypeReg})
		if err == nil {
			_, err = archive.Write(data)
		}
		return err
	}
	var text bytes.Buffer
	c.write(&text, terminal.Plain)
	c.files = append([]collected{{"README.txt", kindText, text.Bytes()}}, c.files...)
	slices.SortStableFunc(c.files, func(a, b collected) int { return strings.Compare(a.name, b.name) })
	for _, f := range c.files {
		data := f.data
		if f.kind == kindHost {
			data = c.redact.RedactHost(data)
		} else {
			data = c.redact.Text(data)
		}
		if err := put(string(c.redact.Text([]byte(f.name))), data); err != nil {
			return nil, err
		}
	}
	if err := archive.Close(); err != nil {
		return nil, err
	}
	if err := zip.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
