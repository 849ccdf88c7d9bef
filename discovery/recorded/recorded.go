// Package recorded stores the files that discovery reads from a machine in one text file, a
// recorded host. The package reads such a file as a file system in memory, or lays it out as a
// directory. It writes only below that directory, opens no device nodes and depends on no
// accelerator.
//
// A recorded host may come from an untrusted source. Reading a recorded host creates nothing on
// this machine. Laying one out creates device nodes only if the caller requests them, and only
// below dev.
//
// A recorded host is a txtar archive of a machine's /sys, /proc and /dev. The name of an entry
// contains its type, except for plain files:
//
//	One GPU behind a bridge. Text up to the first entry is a comment.
//
//	-- sys/bus/pci/devices/0000:03:00.0 -> ../../../devices/pci0000:00/0000:00:01.0/0000:03:00.0 --
//	-- sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0/vendor --
//	0x1002
//	-- sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0/serial_number ! input/output error --
//	-- sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0/drm/ --
//	-- dev/dri/card0 c 226:0 --
//	-- end --
//
// The entries are, in this order: a link, a file, an unreadable file, an empty directory, a
// character device (b for a block device) and the end. The entry "end" is required as the last
// entry. Without it, a truncated text would look like a smaller machine.
package recorded

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/tools/txtar"
)

// Host is a recorded host. Its entries have been validated: no entry leaves the directory of a
// layout.
type Host struct {
	comment string
	entries []entry
}

// Comment returns the text before the first entry.
func (h *Host) Comment() string { return h.comment }

type kind int

const (
	file kind = iota
	directory
	link
	node
	unreadable
)

// entry is an entry in the file system of a host.
type entry struct {
	path string // in the form of fs.FS: "dev/kvm"
	kind kind

	data         []byte // of a file
	target       string // of a link
	block        bool   // of a node, like the numbers
	major, minor uint32
	reason       string // why the entry is unreadable
}

const (
	endMarker  = "end"
	linkArrow  = " -> "
	unreadMark = " ! "
)

// nodeName matches "dev/kvm c 10:232". The kernel has 12 bits of major and 20 of minor number, so
// no number has more than seven digits.
var nodeName = regexp.MustCompile(`^(.+) ([bc]) ([0-9]{1,4}):([0-9]{1,7})$`)

// Parse reads a recorded host. If an archive is truncated or garbled, or would write outside its
// directory, Parse returns an error with the line.
func Parse(data []byte) (*Host, error) {
	archive := txtar.Parse(data)
	if line, ok := strayMarker(archive.Comment); ok {
		return nil, fmt.Errorf("recorded host: line %d: %s", line, garbled)
	}
	h := &Host{comment: string(archive.Comment)}
	kinds := make(map[string]kind, len(archive.Files))
	line := 1 + bytes.Count(archive.Comment, []byte("\n"))
	for i, f := range archive.Files {
		if f.Name == endMarker {
			if i != len(archive.Files)-1 || len(bytes.TrimSpace(f.Data)) > 0 {
				return nil, fmt.Errorf("recorded host: line %d: something follows the entry %q, which must be the last", line+1, endMarker)
			}
			return h, checkParents(h.entries, kinds)
		}
		if stray, ok := strayMarker(f.Data); ok {
			return nil, fmt.Errorf("recorded host: line %d: %s", line+stray, garbled)
		}
		e, err := parseEntry(f)
		if err != nil {
			return nil, fmt.Errorf("recorded host: line %d: %w", line, err)
		}
		if _, twice := kinds[e.path]; twice {
			return nil, fmt.Errorf("recorded host: line %d: %s appears twice", line, e.path)
		}
		kinds[e.path] = e.kind
		h.entries = append(h.entries, e)
		line += 1 + bytes.Count(f.Data, []byte("\n"))
	}
	if len(h.entries) == 0 {
		return nil, errors.New("recorded host: no entry such as \"-- sys/bus/pci/devices/ --\"")
	}
	return nil, fmt.Errorf("recorded host: cut short: the last entry is %s, and not %q", h.entries[len(h.entries)-1].path, endMarker)
}

const garbled = `begins with "-- " as an entry does, and does not end with " --"`

// strayMarker returns the number of the first line, counted from 1, that looks like an entry but is
// not.
func strayMarker(text []byte) (int, bool) {
	line := 0
	for text := range bytes.Lines(text) {
		line++
		if bytes.HasPrefix(text, []byte("-- ")) {
			return line, true
		}
	}
	return 0, false
}

// parseEntry parses an entry by its name.
func parseEntry(f txtar.File) (entry, error) {
	e := entry{path: f.Name, data: f.Data}
	if name, target, ok := strings.Cut(f.Name, linkArrow); ok {
		e = entry{path: name, kind: link, target: target}
	} else if name, reason, ok := strings.Cut(f.Name, unreadMark); ok {
		e = entry{path: name, kind: unreadable, reason: reason}
	} else if m := nodeName.FindStringSubmatch(f.Name); m != nil {
		e = entry{path: m[1], kind: node, block: m[2] == "b", major: parseNumber(m[3]), minor: parseNumber(m[4])}
	} else if name, ok := strings.CutSuffix(f.Name, "/"); ok {
		e = entry{path: name, kind: directory}
	}
	if e.kind != file && len(bytes.TrimSpace(f.Data)) > 0 {
		return e, fmt.Errorf("%s: only a file has a content", e.path)
	}
	return e, e.check()
}

// parseNumber parses digits that nodeName has matched.
func parseNumber(digits string) uint32 {
	n, _ := strconv.ParseUint(digits, 10, 32)
	return uint32(n)
}

// check returns an error if the entry is invalid.
func (e *entry) check() error {
	if !fs.ValidPath(e.path) || e.path == "." || strings.ContainsFunc(e.path, unicode.IsControl) || strings.TrimSpace(e.path) != e.path {
		return fmt.Errorf("%q is no path: it must be relative and without empty, . and .. elements", e.path)
	}
	if end := e.path + " "; strings.HasSuffix(end, linkArrow) || strings.HasSuffix(end, unreadMark) {
		return fmt.Errorf("%q does not say where the link leads, or why nothing could be read", e.path)
	}
	switch {
	case e.kind == link:
		return checkTarget(e.path, e.target)
	case e.kind == node && !strings.HasPrefix(e.path, "dev/"):
		return fmt.Errorf("%s: a device node that is not below dev", e.path)
	case strings.ContainsFunc(e.reason, unicode.IsControl): // the reason may be displayed
		return fmt.Errorf("%s: the reason has control characters", e.path)
	}
	return nil
}

// checkTarget refuses links that could lead out of the layout's directory. No parent of an entry is
// a link, so a target that has ".." elements only at the beginning can be resolved without a file
// system.
func checkTarget(name, target string) error {
	climbed := false
	for element := range strings.SplitSeq(target, "/") {
		if element == ".." && climbed {
			return fmt.Errorf("%s: link to %q, which goes up after going down", name, target)
		}
		climbed = climbed || element != ".."
	}
	if target == "" || path.IsAbs(target) || !fs.ValidPath(path.Join(path.Dir(name), target)) || strings.ContainsFunc(target, unicode.IsControl) {
		return fmt.Errorf("%s: link to %q, which is not below the host's root", name, target)
	}
	return nil
}

// checkParents returns an error if an entry is below another entry that is not a directory.
func checkParents(entries []entry, kinds map[string]kind) error {
	for _, e := range entries {
		for parent := path.Dir(e.path); parent != "."; parent = path.Dir(parent) {
			if kind, ok := kinds[parent]; ok && kind != directory {
				return fmt.Errorf("recorded host: %s lies below %s, which is no directory", e.path, parent)
			}
		}
	}
	return nil
}

// name returns the entry's name in the archive, between the dashes.
func (e *entry) name() string {
	switch e.kind {
	case directory:
		return e.path + "/"
	case link:
		return e.path + linkArrow + e.target
	case unreadable:
		return e.path + unreadMark + e.reason
	case node:
		letter := "c"
		if e.block {
			letter = "b"
		}
		return fmt.Sprintf("%s %s %d:%d", e.path, letter, e.major, e.minor)
	}
	return e.path
}
