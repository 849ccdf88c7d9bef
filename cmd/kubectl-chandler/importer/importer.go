// Package importer converts configurations of other device plugins to a DriverConfig, and objects of
// other DRA drivers to objects for Chandler, with a note for each setting that has no equivalent. It
// opens no file and reads nothing of a host.
package importer

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/dra"
	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/hostdevices"
	"chandler.dev/cmd/kubectl-chandler/importer/network"
	"chandler.dev/cmd/kubectl-chandler/importer/nvidia"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/vendors"
)

// A File is a file to import.
type File struct {
	Name string // the name in messages
	Data []byte
}

// Options are settings of an import that the files do not contain.
type Options struct {
	// Named selects one of several named configurations, such as those of a ConfigMap with a
	// configuration for each node of the NVIDIA plugin. "" selects all of them.
	Named string

	// Only excludes all families that the files do not mention.
	Only bool
}

// Import reads files together, since they can belong together, such as the arguments of a plugin
// and its configuration file. The error names each file that could not be imported.
func Import(files []File, options Options) (*Result, error) {
	im := newImporter(options)
	var errs []error
	documents := make([][]source.Value, len(files))
	for i, file := range files {
		var err error
		if documents[i], err = source.Parse(file.Name, file.Data); err != nil {
			errs = append(errs, source.PlaceErrors(file.Name, err)...)
		}
		for _, document := range documents[i] {
			im.chooseDefault(document)
			im.findObjects(document)
		}
	}
	for _, document := range slices.Concat(documents...) {
		im.findScopes(document)
	}
	for i, file := range files {
		if err := im.file(documents[i]); err != nil {
			errs = append(errs, source.PlaceErrors(file.Name, err)...)
		}
	}
	if name := options.Named; name != "" && !slices.Contains(im.seen, name) {
		known := slices.DeleteFunc(im.seen, func(name string) bool { return name == "" })
		if len(known) == 0 {
			errs = append(errs, fmt.Errorf("no configuration is called %q; the files contain no configurations with names", name))
		} else {
			errs = append(errs, fmt.Errorf("no configuration is called %q; there are %s", name, strings.Join(known, ", ")))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	for _, f := range im.Formats {
		if im.Config.Scope = f.Scope; f.Finish != nil && im.Found[f.Name] {
			f.Finish()
		}
		if f.NeedsDocument && f.FoundIn != nil && !f.DocumentRead {
			im.Notes.AddPodChange(*f.FoundIn, "which devices the plugin offers is in a file that is not among those imported")
		}
	}
	for _, v := range im.unknown {
		im.Notes.AddPodChange(v, "is a device plugin that the import does not support: keep it, or offer its devices by entries of resources or paths")
	}
	for _, file := range slices.Sorted(maps.Keys(im.unreadValues)) {
		im.Notes.AddRemark(source.Value{File: file}, "not read, because they configure no device plugin: %s", strings.Join(im.unreadValues[file], ", "))
	}
	im.Config.Scope = nil
	switch {
	case options.Only && im.hasPlugin():
		im.excludeOthers()
	case options.Only:
		im.Notes.AddRemark(source.Value{}, "no family is excluded, because the files contain no configuration of a device plugin")
	}
	return im.result(), nil
}

// importer recognises the formats of documents, and reads the documents.
type importer struct {
	*plugin.Import
	options  Options
	adapters network.Adapters // the adapters that the pools of the shared RDMA plugin select

	variableMaps map[string]bool     // the ConfigMaps that containers have environment variables from, by name
	workloads    map[string]bool     // the DaemonSets in the files, namespace/name
	unreadValues map[string][]string // objects that belong to no plugin, by file
	unknown      []source.Value      // containers of device plugins that are not known
	around       *[]*v1alpha1.Nodes  // the nodes of the object around the configuration that is read, or nil

	seen      []string     // the names of configurations that apply to some nodes only
	byDefault source.Value // the name of the configuration of nodes that select none
	fallbacks source.Value // the fallback strategies of the NVIDIA chart, for nodes that select no configuration
	operator  bool         // an operator gives no configuration to nodes that select none, except byDefault
}

func newImporter(options Options) *importer {
	im := &importer{Import: plugin.NewImport(), options: options, unreadValues: make(map[string][]string), workloads: make(map[string]bool), variableMaps: make(map[string]bool)}
	im.Formats = im.newFormats()
	return im
}

// newFormats returns all formats, in the order in which they recognise documents and containers.
func (im *importer) newFormats() []*plugin.Format {
	formats := nvidia.NewFormats(im.Import)
	formats = append(formats, vendors.NewROCm(im.Import))
	formats = append(formats, vendors.NewIntel(im.Import)...)
	formats = append(formats, vendors.NewXilinx(im.Import))
	formats = append(formats, network.NewFormats(im.Import, &im.adapters)...)
	formats = append(formats, hostdevices.NewKubeVirt(im.Import), dra.NewFormat(im.Import))
	formats = append(formats, vendors.NewTable(im.Import)...)
	formats = append(formats, hostdevices.NewSquat(im.Import)) // last, because its command is recognised by a flag alone
	return formats
}

// Formats returns a list of the formats that can be imported, one plugin per line.
func Formats() string {
	var lines []string
	for _, f := range newImporter(Options{}).Formats {
		line := fmt.Sprintf("  %s: %s\n", cmp.Or(f.Group, f.Name), f.Forms)
		if !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

// errUnknown is the error for a file of no known format.
func (im *importer) errUnknown(file string) error {
	for _, v := range im.unknown {
		if v.File == file {
			return &source.Error{Line: v.Line(), Message: fmt.Sprintf("%s is a device plugin that the import does not support; the supported formats are\n%s", cmp.Or(v.Text(), v.Path), strings.TrimRight(Formats(), "\n"))}
		}
	}
	return fmt.Errorf("it contains no supported configuration; the supported formats are\n%s", strings.TrimRight(Formats(), "\n"))
}

// chooseDefault stores the name of the configuration that applies to nodes which select none. The
// plugin's own chart falls back to a configuration named default, or to the only one. The GPU
// operator has no such fallback.
func (im *importer) chooseDefault(v source.Value) {
	for _, at := range [][]string{{"spec", "devicePlugin"}, {"devicePlugin"}, {}} {
		config := v.At(at...).At("config")
		if im.byDefault.Text() == "" {
			im.byDefault = config.At("default")
		}
		if strategies := config.At("fallbackStrategies"); !strategies.IsNull() {
			im.fallbacks = strategies
		}
		im.operator = im.operator || len(at) > 0 && config.HasAny("name", "create", "data")
	}
}

// file reads the documents of a file.
func (im *importer) file(documents []source.Value) error {
	if len(documents) == 0 {
		return nil
	}
	known, err := im.importEach(documents)
	if err == nil && !known {
		err = im.errUnknown(documents[0].File)
	}
	return err
}

// recogniseFormat returns the format of a document, nil if there is none.
func (im *importer) recogniseFormat(v source.Value) *plugin.Format {
	for _, f := range im.Formats {
		if f.IsDocument != nil && f.IsDocument(v) {
			return f
		}
	}
	return nil
}

// readDocument reads a document of a known format.
func (im *importer) readDocument(f *plugin.Format, v source.Value) {
	scope := im.around
	var defaults map[string]string
	if f.DefaultSelector != nil {
		defaults = f.DefaultSelector(v)
	}
	if pod, ok := plugin.PlacementOf(v); ok || defaults != nil {
		terms := im.placement(pod, defaults)
		scope = &terms
	}
	if scope != nil {
		f = im.formatOn(f, *scope)
	}
	im.Found[f.Name], f.DocumentRead = true, true
	im.Config.Scope = f.Scope
	f.ReadDocument(v)
	if f.Configurations != nil {
		im.chooseDefault(v)
		if inside := f.Configurations(v); len(inside) > 0 {
			im.importChosen(f, inside)
		}
	}
}

// hasPlugin reports whether the files contain the configuration of a device plugin, unlike the
// objects of a DRA driver alone.
func (im *importer) hasPlugin() bool {
	return slices.ContainsFunc(im.Formats, func(f *plugin.Format) bool { return im.Found[f.Name] && f.Name != dra.FormatName })
}

// excludeOthers excludes the devices of families that no imported plugin offers.
func (im *importer) excludeOthers() {
	var families []string
	for _, f := range im.Formats {
		if im.Found[f.Name] {
			families = append(families, f.Families...)
		}
	}
	slices.Sort(families)
	families = slices.Compact(families)
	im.Config.AddExclude(source.Value{}, "!("+expression.OneOf(expression.Family, families)+")")
}
