// Package recorded keeps what discovery reads of a machine in one text file, a
// recorded host. It reads such a file as a file system in memory, or lays it
// out as a directory. It writes only below that directory, opens no device node
// and knows no accelerator.
//
// A recorded host may come from a stranger. Reading one makes nothing on this
// machine, and laying one out makes device nodes only where the caller asks for
// them, and only below dev.
//
// A recorded host is a txtar archive of a machine's /sys, /proc and /dev. The
// name of an entry says of which kind it is, unless it is a plain file:
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
// These are, in this order: a link, a file, a file that could not be read, an
// empty directory, a character device (b for a block device) and the end. The
// entry "end" must be there, and be the last one. Without it a text that was cut
// short would pass for a smaller machine.
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

// Host is a recorded host. Its entries have been checked: none leaves the
// directory that it is laid out in.
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

// entry is one thing in the file system of a host.
type entry struct {
	path string // as of fs.FS: "dev/kvm"
	kind kind

	data         []byte // of a file
	target       string // of a link
	block        bool   // of a node, as are the numbers
	major, minor uint32
	reason       string // of what is unreadable
}

const (
	endMarker  = "end"
	linkArrow  = " -> "
	unreadMark = " ! "
)

// nodeName matches "dev/kvm c 10:232". The kernel has 12 bits of major and 20
// of minor number, so no number is longer than seven digits.
var nodeName = regexp.MustCompile(`^(.+) ([bc]) ([0-9]{1,4}):([0-9]{1,7})$`)

// Parse reads a recorded host. An archive that was cut short, is garbled or
// would write outside its directory is an error that names the line.
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

// strayMarker returns the line, counted from 1, that was meant to be an entry
// and is not.
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

// parseEntry reads an entry by its name.
func parseEntry(f txtar.File) (entry, error) {
	e := entry{path: f.Name, data: f.Data}
	if name, target, ok := strings.Cut(f.Name, linkArrow); ok {
		e = entry{path: name, kind: link, target: target}
	} else if name, reason, ok := strings.Cut(f.Name, unreadMark); ok {
		e = entry{path: name, kind: unreadable, reason: reason}
	} else if m := nodeName.FindStringSubmatch(f.Name); m != nil {
		e = entry{path: m[1], kind: node, block: m[2] == "b", major: number(m[3]), minor: number(m[4])}
	} else if name, ok := strings.CutSuffix(f.Name, "/"); ok {
		e = entry{path: name, kind: directory}
	}
	if e.kind != file && len(bytes.TrimSpace(f.Data)) > 0 {
		return e, fmt.Errorf("%s: only a file has a content", e.path)
	}
	return e, e.check()
}

// number parses digits that nodeName has matched.
func number(digits string) uint32 {
	n, _ := strconv.ParseUint(digits, 10, 32)
	return uint32(n)
}

// check reports why the archive may not have such an entry.
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
	case strings.ContainsFunc(e.reason, unicode.IsControl): // it is shown to people
		return fmt.Errorf("%s: the reason has control characters", e.path)
	}
	return nil
}

// checkTarget refuses links that could lead out of the directory that the host
// is laid out in. As no parent of an entry is a link, a target that only
// begins with ".." elements can be followed on paper.
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

// checkParents reports entries below something that is no directory.
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

// name returns what stands for the entry between its dashes.
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
