package plugin

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
)

// A Fate is the treatment of an option.
type Fate int

// The treatments of options.
const (
	FateIdle      Fate = iota // the option has no meaning for Chandler, and pods do not notice
	FatePodChange             // pods get something else without the option
	FateCarried               // the format's code reads the option
)

// An Option is a setting of a plugin, in any of its notations.
type Option struct {
	Name      string // the flag; without a flag, the field
	Variable  string // the environment variable, if it is not the flag's name in capitals
	Field     string // the dotted path in the plugin's own file or object
	HelmField string // the dotted path in Helm values

	Kind       yaml.Kind          // the kind of the value, 0 for any
	NoValue    bool               // the flag needs no value
	Repeatable bool               // the option can be set more than once
	Fate       Fate               // ignored with Read
	Harmless   []string           // values that change nothing
	Reason     string             // the reason why the option is not imported
	Read       func(source.Value) // reads the value, after all files were read, or nil
}

// wanted returns the type of the option's value, with an article.
func (o *Option) wanted() string {
	switch {
	case o.Kind == yaml.MappingNode:
		return "an object"
	case o.NoValue:
		return "a boolean"
	}
	return "a string"
}

// variable returns the name of the option's environment variable.
func (o *Option) variable() string {
	return cmp.Or(o.Variable, strings.ToUpper(strings.ReplaceAll(o.Name, "-", "_")))
}

// isHarmless reports whether a value changes nothing.
func (o *Option) isHarmless(v source.Value) bool {
	if v.IsNull() || v.IsText() && v.Text() == "" || (v.IsList() || v.IsMap()) && len(v.Node.Content) == 0 {
		return true
	}
	for _, text := range v.ListTexts() {
		for part := range strings.SplitSeq(text, ",") {
			if !slices.Contains(o.Harmless, strings.ToLower(strings.TrimSpace(part))) {
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

// loggingWithoutValue lists the logging flags that take no value.
var loggingWithoutValue = []string{"logtostderr", "alsologtostderr", "skip_headers", "skip_log_headers", "add_dir_header", "one_output", "debug", "version", "help", "h"}

// The sources of a setting, by increasing precedence.
const (
	InFile = iota
	InEnv
	InFlags
)

// Settings holds the values of a plugin's options, by name.
type Settings struct {
	im    *Import
	table []Option
	set   map[string]setting
}

type setting struct {
	value source.Value
	rank  int
}

// NewSettings returns settings without values. table lists the options of the plugin.
func NewSettings(im *Import, table []Option) *Settings {
	return &Settings{im: im, table: table, set: make(map[string]setting)}
}

// Clone returns a copy that can be changed independently.
func (s *Settings) Clone() *Settings { return &Settings{s.im, s.table, maps.Clone(s.set)} }

// Put sets an option, unless a source with higher precedence has set it already. A null value sets
// nothing.
func (s *Settings) Put(o *Option, v source.Value, rank int) {
	if v.IsNull() {
		return
	}
	name := cmp.Or(o.Name, o.Field, o.HelmField)
	if before, ok := s.set[name]; ok {
		if before.rank > rank {
			return
		}
		if before.rank == rank && !o.Repeatable && before.value.Short() != v.Short() {
			s.im.Notes.AddPodChange(before.value, "is set again at %s, and the last value applies", v.Origin())
		}
	}
	s.set[name] = setting{v, rank}
}

// FindFlag returns the option with a flag, nil if there is none.
func (s *Settings) FindFlag(name string) *Option {
	return s.find(func(o *Option) bool { return o.Name == name })
}

// FindField returns the option with a path in the plugin's own file, nil if there is none.
func (s *Settings) FindField(path string) *Option {
	return s.find(func(o *Option) bool { return o.Field == path })
}

// find returns the first option that matches, nil if there is none.
func (s *Settings) find(is func(*Option) bool) *Option {
	i := slices.IndexFunc(s.table, func(o Option) bool { return is(&o) })
	if i < 0 {
		return nil
	}
	return &s.table[i]
}

// ReadFlags reads the arguments and environment variables of a container. Unknown flags are noted, and
// variables with unknown values.
func (s *Settings) ReadFlags(c Container) {
	unknown := s.im.resolveVariables(c)
	for _, name := range slices.Sorted(maps.Keys(unknown)) {
		o := s.find(func(o *Option) bool { return o.variable() == name && name != "" })
		if o != nil && (o.Fate != FateIdle || o.Read != nil) {
			s.im.Notes.AddPodChange(unknown[name], "the value is not in the files; import the ConfigMap too, or write the value itself")
		}
	}
	named := func(name string) *Option {
		return s.find(func(o *Option) bool {
			return o.Name != "" && (o.Name == name || o.Name == strings.ReplaceAll(name, "_", "-"))
		})
	}
	alone := func(name string) bool {
		o := named(name)
		return o != nil && o.NoValue || slices.Contains(loggingWithoutValue, name)
	}
	for _, arg := range source.SplitArguments(c.Args, alone) {
		if name, ok := strings.CutPrefix(arg.Value.Text(), "$("); ok && c.Env[strings.TrimSuffix(name, ")")].IsText() {
			arg.Value.Node = yamlnode.NewScalar(c.Env[strings.TrimSuffix(name, ")")].Text(), arg.Value.Node.Line)
		}
		if _, ok := never[arg.Name]; ok && named(arg.Name) == nil {
			continue
		}
		switch o := named(arg.Name); {
		case arg.Name == "":
		case (strings.Contains(arg.Value.Text(), "{{") || strings.Contains(arg.Value.Text(), "$(")) && (o == nil || o.Fate != FateIdle || o.Read != nil):
			s.im.Notes.AddPodChange(arg.Value, "is set elsewhere, and its value is unknown")
		case o == nil:
			s.im.Notes.AddPodChange(arg.Value, "is an unknown flag")
		default:
			s.Put(o, arg.Value, InFlags)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Env)) {
		if o := s.find(func(o *Option) bool { return o.variable() == name && name != "" }); o != nil {
			s.Put(o, c.Env[name], InEnv)
		}
	}
}

// ReadFields reads the fields of an object. It calls rest for each unknown field.
func (s *Settings) ReadFields(v source.Value, key func(*Option) string, rest func(source.Value)) {
	s.fields(v, "", InFile, key, rest)
}

// ReadHelmValues reads the values of a chart that sets the plugin's environment variables from them. It
// calls rest for each unknown field.
func (s *Settings) ReadHelmValues(v source.Value, rest func(source.Value)) {
	s.fields(v, "", InEnv, HelmField, rest)
}

func (s *Settings) fields(v source.Value, prefix string, rank int, key func(*Option) string, rest func(source.Value)) {
	for name, field := range v.Fields() {
		path := prefix + name
		if o := s.find(func(o *Option) bool { return key(o) == path }); o != nil {
			s.Put(o, field, rank)
			continue
		}
		deeper := s.find(func(o *Option) bool { return strings.HasPrefix(key(o), path+".") })
		switch {
		case deeper != nil && field.IsMap():
			s.fields(field, path+".", rank, key, rest)
		case deeper != nil && field.IsNull():
		case deeper != nil:
			s.im.Notes.AddWrongType(field, "an object")
		default:
			rest(field)
		}
	}
}

// OwnField returns the path of an option in the plugin's own file.
func OwnField(o *Option) string { return o.Field }

// HelmField returns the path of an option in Helm values.
func HelmField(o *Option) string { return o.HelmField }

// Get returns the value of an option, the zero value if the option is not set.
func (s *Settings) Get(name string) source.Value { return s.set[name].value }

// FinishOptions handles all options in the order of the table: it runs the code of each option with
// a Read function, and notes the options that are not imported.
func (s *Settings) FinishOptions() {
	names := slices.Sorted(maps.Keys(s.set))
	for i := range s.table {
		o := &s.table[i]
		name := cmp.Or(o.Name, o.Field, o.HelmField)
		if !slices.Contains(names, name) {
			continue
		}
		v := s.set[name].value
		switch {
		case o.Kind != 0 && !v.IsNull() && v.Node.Kind != o.Kind:
			s.im.Notes.AddWrongType(v, o.wanted())
		case o.Read != nil && !v.IsNull():
			o.Read(v)
		case o.Fate == FateCarried || o.isHarmless(v):
		case o.Fate == FatePodChange:
			s.im.Notes.AddPodChange(v, "%s", o.Reason)
		default:
			s.im.Notes.AddRemark(v, "%s", o.Reason)
		}
	}
}
