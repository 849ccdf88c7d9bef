// Package notes collects the notes of an import: the settings that are not imported, and the actions
// that keep pods working as before. Each note has the place of its setting.
package notes

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
)

// A Note is a setting that is not imported, or an action that keeps pods working as before.
type Note struct {
	Place string // such as config.yaml:4
	Field string // such as flags.plugin.deviceListStrategy
	Value string // such as volume-mounts
	Why   string

	// Pods reports whether pods get something else as a result.
	Pods bool

	result bool // the note describes the result of other notes

	file string
	line int
}

func (n Note) String() string {
	parts := []string{n.Place, n.Field, n.Value, n.Why}
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), ": ")
}

// A List collects notes.
type List struct {
	notes []Note
}

// add adds a note about a value. n has the kind of the note.
func (l *List) add(v source.Value, n Note, format string, args ...any) {
	n.Field, n.Value, n.Why = source.OneLine(v.Path), source.OneLine(v.Short()), source.OneLine(fmt.Sprintf(format, args...))
	n.file, n.line = v.File, v.Line()
	if n.file != "" {
		n.Place = source.OneLine(n.file)
		if n.line > 0 {
			n.Place = fmt.Sprintf("%s:%d", n.Place, n.line)
		}
	}
	if !slices.Contains(l.notes, n) { // a flag can apply to several configurations
		l.notes = append(l.notes, n)
	}
}

// AddPodChange adds a note about a change for pods.
func (l *List) AddPodChange(v source.Value, format string, args ...any) {
	l.add(v, Note{Pods: true}, format, args...)
}

// AddResult adds a note about the result of changes for pods that other notes describe.
func (l *List) AddResult(v source.Value, format string, args ...any) {
	l.add(v, Note{Pods: true, result: true}, format, args...)
}

// AddRemark adds a note without a change for pods.
func (l *List) AddRemark(v source.Value, format string, args ...any) {
	l.add(v, Note{}, format, args...)
}

// AddWrongType notes a value that is not of the wanted type.
func (l *List) AddWrongType(v source.Value, wanted string) {
	l.AddPodChange(v, "is %s; want %s", v.TypeName(), wanted)
}

// AddUnknownField notes an unknown field of a plugin's own file. A name that cannot be a field of the
// plugin is taken for a remark of the author.
func (l *List) AddUnknownField(v source.Value) {
	name := v.FieldName()
	if strings.HasPrefix(name, "_") || strings.HasPrefix(name, "/") || strings.HasPrefix(name, "x-") || strings.HasPrefix(name, "$") || strings.HasPrefix(strings.ToLower(name), "comment") {
		l.AddRemark(v, "is taken for a remark")
		return
	}
	l.AddPodChange(v, "is an unknown field")
}

// AddUnknownExcept notes the fields of an object that are not in the list.
func (l *List) AddUnknownExcept(v source.Value, known ...string) {
	for _, field := range v.FieldsExcept(known...) {
		l.AddUnknownField(field)
	}
}

// AddOnlyRead notes that the rest of an object was not read.
func (l *List) AddOnlyRead(v source.Value, found []string) {
	slices.Sort(found)
	at := source.Value{Node: yamlnode.NewScalar("", v.Node.Line), File: v.File, Above: v.Above, Path: v.Path}
	l.AddRemark(at, "of this object only %s was read", strings.Join(found, ", "))
}

// Sorted returns the notes by place, without duplicates.
func (l *List) Sorted() []Note {
	slices.SortStableFunc(l.notes, func(a, b Note) int {
		return cmp.Or(strings.Compare(a.file, b.file), cmp.Compare(a.line, b.line))
	})
	return slices.CompactFunc(l.notes, func(a, b Note) bool { return a.String() == b.String() })
}

// CountPodChanges returns the number of settings with a change for pods. A setting can have several
// notes.
func CountPodChanges(list []Note) int {
	type setting struct{ place, field string }
	changed := make(map[setting]bool)
	for _, n := range list {
		if n.Pods && !n.result {
			changed[setting{n.Place, n.Field}] = true
		}
	}
	return len(changed)
}
