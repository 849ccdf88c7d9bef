// Package importer reads what people wrote for other device plugins and says it
// as a DriverConfig, with a note for each thing that it could not carry over. It
// opens no file and looks at no host.
package importer

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"chandler.dev/api/v1alpha1"
)

// A File is a text that somebody wrote.
type File struct {
	Name string // as messages have it
	Data []byte
}

// Options say what the files do not.
type Options struct {
	// Named is the one of several configurations that is meant, "" for all of them:
	// such as those of a ConfigMap of which NVIDIA's plugin has each node read another.
	Named string

	// Only excludes the families that the files say nothing of.
	Only bool
}

// Import reads files together, since one may say of which another is part: the
// arguments of a plugin and its configuration. An error names each file that it
// could not make anything of.
func Import(files []File, options Options) (*Result, error) {
	im := newImporter(options)
	var errs []error
	documents := make([][]value, len(files))
	for i, file := range files {
		var err error
		if documents[i], err = parse(file); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", file.Name, err))
		}
		for _, document := range documents[i] {
			im.chooseDefault(document)
		}
	}
	for i, file := range files {
		if err := im.file(documents[i]); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", file.Name, err))
		}
	}
	if name := options.Named; name != "" && len(im.seen) > 1 && !slices.Contains(im.seen, name) {
		errs = append(errs, fmt.Errorf("no configuration is called %q; there are %s", name, strings.Join(im.seen, ", ")))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	for _, f := range im.formats {
		if f.finish != nil && im.found[f.name] {
			f.finish()
		}
		if f.needs && f.runsAt != nil && !f.wasRead {
			im.lost(*f.runsAt, "which devices the plugin offers is in a file that is not among those imported")
		}
	}
	for _, file := range sorted(im.unread) {
		im.say(value{file: file}, "not read, since they are of no device plugin: %s", strings.Join(im.unread[file], ", "))
	}
	if options.Only {
		im.excludeOthers()
	}
	return im.result(), nil
}

// A format is what one plugin reads.
type format struct {
	name     string   // NVIDIA's device plugin
	group    string   // the name of all plugins with the same forms, if there are several
	forms    string   // config file, flags, Helm values
	families []string // of Chandler, which offer what the plugin does

	// alternatives says that the files of a ConfigMap are such of which each node
	// reads one: by this label, or else by its name.
	alternatives bool
	label        string

	needs   bool   // the plugin does nothing without a document
	runsAt  *value // a container that runs it, nil if there is none
	wasRead bool   // there was a document

	is   func(value) bool // whether a document is the plugin's
	read func(value)      // reads a document

	runs      func(container) bool // whether a container runs the plugin
	container func(container)      // reads its arguments and environment

	finish func() // reads what could only be read with all the rest
}

// importer is a DriverConfig while it is written.
type importer struct {
	options Options
	formats []*format
	found   map[string]bool // by the name of the format
	config  v1alpha1.DriverConfig
	origins map[string][]string // of the entries of a list of the configuration
	names   map[string]bool     // of what the configuration offers
	notes   []Note
	chart   string                // of Helm, whose values are read
	shared  []map[string][]string // the selectors of pools of adapters that containers have together
	unread  map[string][]string   // objects that are of no plugin, by file

	configMapName string // of the ConfigMap that is read, "" for none

	seen      []string        // the names of configurations of which nodes read one
	byDefault string          // which of several configurations nodes read that say nothing
	nodes     *v1alpha1.Nodes // for which entries are made at present; else those of what they are made of
}

func newImporter(options Options) *importer {
	im := &importer{options: options, found: make(map[string]bool), origins: make(map[string][]string), unread: make(map[string][]string), names: make(map[string]bool)}
	im.config.APIVersion, im.config.Kind = v1alpha1.APIVersion, v1alpha1.KindDriverConfig
	im.config.Mode = v1alpha1.ModeDevicePlugin
	im.formats = []*format{
		newHAMi(im), // whose containers are called as NVIDIA's are
		newNVIDIA(im),
		newGKE(im),
		newAliyun(im),
		newROCm(im),
	}
	im.formats = append(im.formats, newIntel(im)...)
	im.formats = append(im.formats,
		newXilinx(im),
		newSRIOV(im),
		newRDMAShared(im),
		newKubeVirt(im),
		newSquat(im),
	)
	return im
}

// Formats describes what can be imported, a line for each plugin.
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

// errUnknown is of a file that is of no format.
func errUnknown() error {
	return fmt.Errorf("nothing in it is known; known are\n%s", strings.TrimRight(Formats(), "\n"))
}

// chooseDefault remembers which of several named configurations nodes read that say
// nothing.
func (im *importer) chooseDefault(v value) {
	for _, at := range [][]string{{"spec", "devicePlugin"}, {"devicePlugin"}, {}} {
		if name := v.at(at...).at("config", "default").text(); im.byDefault == "" {
			im.byDefault = name
		}
	}
}

// file reads the documents of a file.
func (im *importer) file(documents []value) error {
	if len(documents) == 0 {
		return nil
	}
	known, err := im.each(documents)
	if err == nil && !known {
		err = errUnknown()
	}
	return err
}

// recognise returns the format of a document, nil if there is none.
func (im *importer) recognise(v value) *format {
	for _, f := range im.formats {
		if f.is != nil && f.is(v) {
			return f
		}
	}
	return nil
}

// take reads a document of a known format.
func (im *importer) take(f *format, v value) {
	im.found[f.name], f.wasRead = true, true
	f.read(v)
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
	im.exclude(value{}, "!("+oneOf(familyAttribute, families)+")")
}
