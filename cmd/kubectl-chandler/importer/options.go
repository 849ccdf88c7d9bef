package importer

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
)

// A fate is the treatment of an option.
type fate int

const (
	fateIdle      fate = iota // the option has no meaning for Chandler, and pods do not notice
	fatePodChange             // pods get something else without the option
	fateCarried               // the format's code reads the option
)

// An option is a setting of a plugin, in any of its notations.
type option struct {
	name string // the flag; without a flag, the field
	env  string // the environment variable, if it is not the flag's name in capitals
	at   string // the dotted path in the plugin's own file or object
	in   string // the dotted path in Helm values

	kind  yaml.Kind // the kind of the value, 0 for any
	alone bool      // the flag needs no value
	many  bool      // the option can be set more than once
	fate  fate
	fine  []string // values that change nothing
	why   string   // the reason, for an idle or lost option
	do    func(source.Value)
}

// wanted returns the type of the option's value, with an article.
func (o *option) wanted() string {
	switch {
	case o.kind == yaml.MappingNode:
		return "an object"
	case o.alone:
		return "a boolean"
	}
	return "a string"
}

// variable returns the name of the option's environment variable.
func (o *option) variable() string {
	return cmp.Or(o.env, strings.ToUpper(strings.ReplaceAll(o.name, "-", "_")))
}

// fineAs reports whether a value changes nothing.
func (o *option) fineAs(v source.Value) bool {
	if v.IsNull() || v.IsText() && v.Text() == "" || (v.IsList() || v.IsMap()) && len(v.Node.Content) == 0 {
		return true
	}
	for _, text := range v.ListTexts() {
		for part := range strings.SplitSeq(text, ",") {
			if !slices.Contains(o.fine, strings.ToLower(strings.TrimSpace(part))) {
				return false
			}
		}
	}
	return !v.IsMap()
}

// never lists flags and environment variables of any plugin that do not affect pods: those of klog,
// glog and the Go runtime.
var never = map[string]string{
	"v": "", "vmodule": "", "logtostderr": "", "alsologtostderr": "", "log_dir": "", "log-dir": "", "log_file": "",
	"log_file_max_size": "", "log_backtrace_at": "", "skip_headers": "", "skip_log_headers": "", "add_dir_header": "",
	"one_output": "", "stderrthreshold": "", "log-level": "", "loglevel": "", "log-format": "", "logging-format": "",
	"debug": "", "version": "", "help": "", "h": "", "feature-gates": "",
}

// aloneOfLogging lists the logging flags that take no value.
var aloneOfLogging = []string{"logtostderr", "alsologtostderr", "skip_headers", "skip_log_headers", "add_dir_header", "one_output", "debug", "version", "help", "h"}

// The sources of a setting, by increasing precedence.
const (
	inFile = iota
	inEnv
	inFlags
)

// settings holds the values of a plugin's options, by name.
type settings struct {
	im    *importer
	table []option
	set   map[string]setting
}

type setting struct {
	value source.Value
	rank  int
}

func newSettings(im *importer, table []option) *settings {
	return &settings{im: im, table: table, set: make(map[string]setting)}
}

// clone returns a copy that can be changed independently.
func (s *settings) clone() *settings { return &settings{s.im, s.table, maps.Clone(s.set)} }

// put sets an option, unless a source with higher precedence has set it already. A null value sets
// nothing.
func (s *settings) put(o *option, v source.Value, rank int) {
	if v.IsNull() {
		return
	}
	name := cmp.Or(o.name, o.at, o.in)
	if before, ok := s.set[name]; ok {
		if before.rank > rank {
			return
		}
		if before.rank == rank && !o.many && before.value.Short() != v.Short() {
			s.im.notePodChange(before.value, "is set again at %s, and the last value applies", v.Origin())
		}
	}
	s.set[name] = setting{v, rank}
}

// find returns the first option that matches, nil if there is none.
func (s *settings) find(is func(*option) bool) *option {
	i := slices.IndexFunc(s.table, func(o option) bool { return is(&o) })
	if i < 0 {
		return nil
	}
	return &s.table[i]
}

// flags reads the arguments and environment variables of a container. Unknown flags are noted, and
// variables with unknown values.
func (s *settings) flags(c container) {
	unknown := s.im.resolveVariables(c)
	for _, name := range slices.Sorted(maps.Keys(unknown)) {
		o := s.find(func(o *option) bool { return o.variable() == name && name != "" })
		if o != nil && (o.fate != fateIdle || o.do != nil) {
			s.im.notePodChange(unknown[name], "the value is not in the files; import the ConfigMap too, or write the value itself")
		}
	}
	named := func(name string) *option {
		return s.find(func(o *option) bool {
			return o.name != "" && (o.name == name || o.name == strings.ReplaceAll(name, "_", "-"))
		})
	}
	alone := func(name string) bool {
		o := named(name)
		return o != nil && o.alone || slices.Contains(aloneOfLogging, name)
	}
	for _, arg := range source.SplitArguments(c.args, alone) {
		if name, ok := strings.CutPrefix(arg.Value.Text(), "$("); ok && c.env[strings.TrimSuffix(name, ")")].IsText() {
			arg.Value.Node = yamlnode.NewScalar(c.env[strings.TrimSuffix(name, ")")].Text(), arg.Value.Node.Line)
		}
		if _, ok := never[arg.Name]; ok && named(arg.Name) == nil {
			continue
		}
		switch o := named(arg.Name); {
		case arg.Name == "":
		case (strings.Contains(arg.Value.Text(), "{{") || strings.Contains(arg.Value.Text(), "$(")) && (o == nil || o.fate != fateIdle || o.do != nil):
			s.im.notePodChange(arg.Value, "is set elsewhere, and its value is unknown")
		case o == nil:
			s.im.notePodChange(arg.Value, "is an unknown flag")
		default:
			s.put(o, arg.Value, inFlags)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.env)) {
		if o := s.find(func(o *option) bool { return o.variable() == name && name != "" }); o != nil {
			s.put(o, c.env[name], inEnv)
		}
	}
}

// file reads the fields of an object. It calls rest for each unknown field.
func (s *settings) file(v source.Value, key func(*option) string, rest func(source.Value)) {
	s.fields(v, "", inFile, key, rest)
}

// helmValues reads the values of a chart that sets the plugin's environment variables from them. It
// calls rest for each unknown field.
func (s *settings) helmValues(v source.Value, rest func(source.Value)) {
	s.fields(v, "", inEnv, inValues, rest)
}

func (s *settings) fields(v source.Value, prefix string, rank int, key func(*option) string, rest func(source.Value)) {
	for name, field := range v.Fields() {
		path := prefix + name
		if o := s.find(func(o *option) bool { return key(o) == path }); o != nil {
			s.put(o, field, rank)
			continue
		}
		deeper := s.find(func(o *option) bool { return strings.HasPrefix(key(o), path+".") })
		switch {
		case deeper != nil && field.IsMap():
			s.fields(field, path+".", rank, key, rest)
		case deeper != nil && field.IsNull():
		case deeper != nil:
			s.im.noteType(field, "an object")
		default:
			rest(field)
		}
	}
}

// inOwn and inValues return the path of an option in the plugin's own file and in Helm values.
func inOwn(o *option) string    { return o.at }
func inValues(o *option) string { return o.in }

// get returns the value of an option, the zero value if the option is not set.
func (s *settings) get(name string) source.Value { return s.set[name].value }

// finishOptions handles all options in the order of the table: it runs the code of each option with
// a do function, and notes the options that are not imported.
func (s *settings) finishOptions() {
	names := slices.Sorted(maps.Keys(s.set))
	for i := range s.table {
		o := &s.table[i]
		name := cmp.Or(o.name, o.at, o.in)
		if !slices.Contains(names, name) {
			continue
		}
		v := s.set[name].value
		switch {
		case o.kind != 0 && !v.IsNull() && v.Node.Kind != o.kind:
			s.im.noteType(v, o.wanted())
		case o.do != nil && !v.IsNull():
			o.do(v)
		case o.fate == fateCarried || o.fineAs(v):
		case o.fate == fatePodChange:
			s.im.notePodChange(v, "%s", o.why)
		default:
			s.im.noteRemark(v, "%s", o.why)
		}
	}
}

// noteType notes a value that is not of the wanted type.
func (im *importer) noteType(v source.Value, wanted string) {
	im.notePodChange(v, "is %s; want %s", v.TypeName(), wanted)
}

// noteUnknown notes an unknown field of a plugin's own file. A name that cannot be a field of the
// plugin is taken for a remark of the author.
func (im *importer) noteUnknown(v source.Value) {
	name := v.FieldName()
	if strings.HasPrefix(name, "_") || strings.HasPrefix(name, "/") || strings.HasPrefix(name, "x-") || strings.HasPrefix(name, "$") || strings.HasPrefix(strings.ToLower(name), "comment") {
		im.noteRemark(v, "is taken for a remark")
		return
	}
	im.notePodChange(v, "is an unknown field")
}

// unknownExcept notes the fields of an object that are not in the list.
func (im *importer) unknownExcept(v source.Value, known ...string) {
	for _, field := range v.FieldsExcept(known...) {
		im.noteUnknown(field)
	}
}

// noteOthers notes, in one note, the fields of a large object that are unrelated to devices.
func (im *importer) noteOthers(v source.Value, fields []source.Value) {
	for _, read := range placementFields(v) {
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
	im.noteRemark(at, "has fields that do not select devices and were not read: %s", strings.Join(names, ", "))
}
