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
	"chandler.dev/cmd/kubectl-chandler/importer/source"
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
	for _, f := range im.formats {
		if im.current = f; f.finish != nil && im.found[f.name] {
			f.finish()
		}
		if f.needs && f.runsAt != nil && !f.wasRead {
			im.notePodChange(*f.runsAt, "which devices the plugin offers is in a file that is not among those imported")
		}
	}
	for _, v := range im.unknown {
		im.notePodChange(v, "is a device plugin that the import does not support: keep it, or offer its devices by entries of resources or paths")
	}
	for _, file := range slices.Sorted(maps.Keys(im.unreadValues)) {
		im.noteRemark(source.Value{File: file}, "not read, because they configure no device plugin: %s", strings.Join(im.unreadValues[file], ", "))
	}
	im.current = nil
	switch {
	case options.Only && im.hasPlugin():
		im.excludeOthers()
	case options.Only:
		im.noteRemark(source.Value{}, "no family is excluded, because the files contain no configuration of a device plugin")
	}
	return im.result(), nil
}

// A format is the configuration format of one plugin.
type format struct {
	name     string   // such as "NVIDIA's device plugin"
	group    string   // the common name of several plugins with the same formats, or ""
	forms    string   // such as "config file, flags, Helm values"
	families []string // the Chandler families that offer the same devices

	// With alternatives, each node reads one of the files of a ConfigMap: the file that the node's
	// label names or, if label is "", the file with the node's name.
	alternatives bool
	label        string

	scoped bool              // scope was set
	scope  []*v1alpha1.Nodes // the nodes where the plugin runs: those of any of the terms, or all if empty

	companion func(container) bool // reports whether a container, for which runs holds, is not the plugin itself, or nil

	needs   bool          // the plugin offers nothing without a configuration document
	runsAt  *source.Value // a container that runs the plugin, or nil
	wasRead bool          // a configuration document was read

	// defaultSelector returns the default node selector of the plugin's chart if a document has the
	// chart's values, or is nil. The values add labels, and remove a label by null.
	defaultSelector func(source.Value) map[string]string

	is   func(source.Value) bool // reports whether a document belongs to the plugin
	read func(source.Value)      // reads a document

	runs      func(container) bool // reports whether a container runs the plugin
	container func(container)      // reads the container's arguments and environment

	finish func() // runs after all files were read
}

// importer builds a DriverConfig.
type importer struct {
	options      Options
	formats      []*format
	found        map[string]bool // by the name of the format
	config       v1alpha1.DriverConfig
	provision    v1alpha1.ProvisionConfig // what plugins do with PCI functions themselves
	origins      map[string][]string      // the sources of each list entry, by the name of the list
	names        map[string]bool          // the resource names in the configuration
	notes        []Note
	objects      []object
	chart        string                // the Helm chart whose values are being read
	shared       []map[string][]string // the selectors of adapter pools that containers share
	unreadValues map[string][]string   // objects that belong to no plugin, by file
	unknown      []source.Value        // containers of device plugins that are not known

	configMaps    map[string]source.Value // the data of the ConfigMaps in the files, by name; the zero value for an ambiguous name
	variableMaps  map[string]bool         // the ConfigMaps that containers have environment variables from, by name
	configMapName string                  // the name of the ConfigMap that is being read, or ""

	seen      []string           // the names of configurations that apply to some nodes only
	byDefault source.Value       // the name of the configuration of nodes that select none
	fallbacks source.Value       // the fallback strategies of the NVIDIA chart, for nodes that select no configuration
	operator  bool               // an operator gives no configuration to nodes that select none, except byDefault
	current   *format            // the format that is being read
	workloads map[string]bool    // the DaemonSets in the files, namespace/name
	around    *[]*v1alpha1.Nodes // the nodes of the object around the configuration that is read, or nil
	nodes     *v1alpha1.Nodes    // the nodes of the entries that are being added; if nil, each entry's source decides
}

func newImporter(options Options) *importer {
	im := &importer{options: options, found: make(map[string]bool), origins: make(map[string][]string), unreadValues: make(map[string][]string), names: make(map[string]bool), workloads: make(map[string]bool), configMaps: make(map[string]source.Value), variableMaps: make(map[string]bool)}
	im.config.APIVersion, im.config.Kind = v1alpha1.APIVersion, v1alpha1.KindDriverConfig
	im.config.Mode = v1alpha1.ModeDevicePlugin
	im.provision.APIVersion, im.provision.Kind = v1alpha1.APIVersion, v1alpha1.KindProvisionConfig
	im.formats = newFormats(im)
	return im
}

// newFormats returns all formats, in the order in which they recognise documents and containers.
func newFormats(im *importer) []*format {
	formats := []*format{
		newHAMi(im), // before NVIDIA, because HAMi containers have similar names
		newNVIDIA(im),
		newGKE(im),
		newAliyun(im),
		newROCm(im),
	}
	formats = append(formats, newIntel(im)...)
	formats = append(formats,
		newXilinx(im),
		newSRIOV(im),
		newRDMAShared(im),
		newKubeVirt(im),
		newDRA(im),
	)
	formats = append(formats, newVendors(im)...)
	formats = append(formats, newSquat(im)) // last, because its command is recognised by a flag alone
	return formats
}

// Formats returns a list of the formats that can be imported, one plugin per line.
func Formats() string {
	var lines []string
	for _, f := range newImporter(Options{}).formats {
		line := fmt.Sprintf("  %s: %s\n", cmp.Or(f.group, f.name), f.forms)
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
func (im *importer) recogniseFormat(v source.Value) *format {
	for _, f := range im.formats {
		if f.is != nil && f.is(v) {
			return f
		}
	}
	return nil
}

// readDocument reads a document of a known format.
func (im *importer) readDocument(f *format, v source.Value) {
	scope := im.around
	var defaults map[string]string
	if f.defaultSelector != nil {
		defaults = f.defaultSelector(v)
	}
	if pod, ok := placementOf(v); ok || defaults != nil {
		terms := im.placement(pod, defaults)
		scope = &terms
	}
	if scope != nil {
		f = im.formatOn(f, *scope)
	}
	im.found[f.name], f.wasRead = true, true
	im.current = f
	f.read(v)
}

// hasPlugin reports whether the files contain the configuration of a device plugin, unlike the
// objects of a DRA driver alone.
func (im *importer) hasPlugin() bool {
	return slices.ContainsFunc(im.formats, func(f *format) bool { return im.found[f.name] && f.name != draFormat })
}

// excludeOthers excludes the devices of families that no imported plugin offers.
func (im *importer) excludeOthers() {
	var families []string
	for _, f := range im.formats {
		if im.found[f.name] {
			families = append(families, f.families...)
		}
	}
	slices.Sort(families)
	families = slices.Compact(families)
	im.addExclude(source.Value{}, "!("+oneOf(familyAttribute, families)+")")
}
