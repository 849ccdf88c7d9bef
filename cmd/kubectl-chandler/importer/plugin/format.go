// Package plugin contains the common parts of all importable plugins: their formats, their options, and the
// containers that run them.
package plugin

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/draft"
	"chandler.dev/cmd/kubectl-chandler/importer/notes"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
)

// A Format is the configuration format of one plugin.
type Format struct {
	Name     string   // such as "NVIDIA's device plugin"
	Group    string   // the common name of several plugins with the same formats, or ""
	Forms    string   // such as "config file, flags, Helm values"
	Families []string // the Chandler families that offer the same devices

	// With Alternatives, each node reads one of the files of a ConfigMap: the file that the node's
	// label names or, if Label is "", the file with the node's name.
	Alternatives bool
	Label        string

	NeedsDocument bool // the plugin offers nothing without a configuration document

	IsDocument   func(source.Value) bool // reports whether a document belongs to the plugin
	ReadDocument func(source.Value)      // reads a document

	// Configurations returns the named configurations inside a document, each for some nodes, or is nil.
	Configurations func(source.Value) []source.Value

	// DefaultSelector returns the default node selector of the plugin's chart if a document has the
	// chart's values, or is nil. The values add labels, and remove a label by null.
	DefaultSelector func(source.Value) map[string]string

	IsContainer   func(Container) bool // reports whether a container runs the plugin or one of its companions
	IsCompanion   func(Container) bool // reports whether such a container is not the plugin itself, or nil
	ReadContainer func(Container)      // reads the container's arguments and environment

	Finish func() // adds the entries after all files were read, or nil

	// The importer sets the other fields.

	Scoped       bool              // Scope was set
	Scope        []*v1alpha1.Nodes // the nodes where the plugin runs: those of any of the terms, or all if empty
	FoundIn      *source.Value     // a container that runs the plugin, or nil
	DocumentRead bool              // a configuration document was read
}

// An Import is what the formats of one import have in common.
type Import struct {
	Formats []*Format
	Found   map[string]bool // the formats in the files, by name
	Notes   *notes.List
	Config  *draft.Config
	Objects []Object // the translated objects of DRA drivers

	Chart         string                  // the Helm chart whose values are being read
	ConfigMapName string                  // the name of the ConfigMap that is being read, or ""
	ConfigMaps    map[string]source.Value // the data of the ConfigMaps in the files, by name; the zero value for an ambiguous name
}

// NewImport returns an import of no formats.
func NewImport() *Import {
	list := new(notes.List)
	return &Import{Notes: list, Config: draft.New(list), Found: make(map[string]bool), ConfigMaps: make(map[string]source.Value)}
}

// An Object is a translated object of a DRA driver.
type Object struct {
	Node *yaml.Node
	From source.Value
}

// OffersFamily reports whether a plugin in the files offers devices of a family.
func (im *Import) OffersFamily(family string) bool {
	return slices.ContainsFunc(im.Formats, func(f *Format) bool { return im.Found[f.Name] && slices.Contains(f.Families, family) })
}

// NoteUnread notes, in one note, the fields of a large object that are unrelated to devices.
func (im *Import) NoteUnread(v source.Value, fields []source.Value) {
	for _, read := range PlacementFields(v) {
		fields = slices.DeleteFunc(fields, func(field source.Value) bool { return field.Path == read.Path })
	}
	if len(fields) == 0 {
		return
	}
	var names []string
	for _, field := range fields {
		names = append(names, strings.TrimPrefix(strings.TrimPrefix(field.Path, v.Path), "."))
	}
	slices.Sort(names)
	at := source.Value{File: v.File, Above: v.Above, Path: v.Path}
	if v.Node != nil {
		at.Node = yamlnode.NewScalar("", v.Node.Line)
	}
	im.Notes.AddRemark(at, "has fields that do not select devices and were not read: %s", strings.Join(names, ", "))
}
