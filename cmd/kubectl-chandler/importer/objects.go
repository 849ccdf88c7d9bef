package importer

import (
	"errors"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// A container is a container that may run a plugin.
type container struct {
	source.Value
	image string
	args  []source.Value          // including the command
	env   map[string]source.Value // the environment variables with a literal value

	references map[string]source.Value // the sources of variables without a literal value (valueFrom), by variable
	sources    []source.Value          // the sources of several variables (envFrom)
}

// names reports whether the image, the command or the container name contains one of the names.
func (c container) names(names ...string) bool {
	where := []string{imageName(c.image), c.At("name").Text()}
	for _, arg := range c.args {
		where = append(where, path.Base(arg.Text()))
		if strings.HasPrefix(arg.Text(), "-") {
			where = where[:len(where)-1]
		}
	}
	for _, name := range names {
		if slices.ContainsFunc(where, func(text string) bool { return strings.Contains(strings.ToLower(text), name) }) {
			return true
		}
	}
	return false
}

// imageName returns an image without its version.
func imageName(image string) string {
	image, _, _ = strings.Cut(image, "@")
	if slash := strings.LastIndex(image, "/"); strings.LastIndex(image, ":") > slash {
		image = image[:strings.LastIndex(image, ":")]
	}
	return image
}

// imageVersion returns the version of an image, "" if it has none.
func imageVersion(image string) string {
	image, _, _ = strings.Cut(image, "@")
	if slash, colon := strings.LastIndex(image, "/"), strings.LastIndex(image, ":"); colon > slash {
		return image[colon+1:]
	}
	return ""
}

// hasFlag reports whether one of the flags is among the arguments.
func (c container) hasFlag(names ...string) bool {
	return slices.ContainsFunc(c.args, func(arg source.Value) bool {
		bare := strings.TrimLeft(arg.Text(), "-")
		name, _, _ := strings.Cut(bare, "=")
		return bare != arg.Text() && slices.Contains(names, name)
	})
}

func containerOf(v source.Value) container {
	c := container{Value: v, image: imageOf(v.At("image")), env: make(map[string]source.Value), references: make(map[string]source.Value), sources: v.At("envFrom").ListItems()}
	for _, field := range []string{"command", source.ArgsField} {
		for _, arg := range v.At(field).ListItems() {
			if arg.IsText() {
				c.args = append(c.args, arg)
			}
		}
	}
	c.args = splitShell(c.args)
	c.setEnv(v.At(source.EnvField))
	return c
}

// script matches the shell flag after which the script follows.
var script = regexp.MustCompile(`^-[a-z]*c$`)

// splitShell splits the script of a shell command such as sh -c into its words. Other arguments are
// returned unchanged.
func splitShell(args []source.Value) []source.Value {
	if len(args) == 0 || !slices.Contains([]string{"sh", "ash", "bash", "dash"}, path.Base(args[0].Text())) {
		return args
	}
	i := slices.IndexFunc(args, func(arg source.Value) bool { return script.MatchString(arg.Text()) }) + 1
	if i > 0 && i < len(args) && args[i].Text() == "--" {
		i++
	}
	if i == 0 || i == len(args) {
		return args
	}
	var out []source.Value
	for _, word := range source.SplitWords(args[i].Node.Value, 1) {
		word.Value, word.Line = strings.TrimRight(word.Value, ";"), args[i].Node.Line
		arg := args[i]
		arg.Node = word
		out = append(out, arg)
	}
	return out
}

// imageOf returns an image, which charts split into repository and tag.
func imageOf(v source.Value) string {
	if !v.IsMap() {
		return v.Text()
	}
	image := v.At("repository").Text()
	if tag := v.At("tag").Text(); tag != "" {
		image += ":" + tag
	}
	return image
}

// setEnv reads environment variables from a container's list or from a map.
func (c container) setEnv(env source.Value) {
	maps.Insert(c.env, env.Fields())
	if env.IsList() {
		for _, variable := range env.ListItems() {
			name := variable.At("name").Text()
			if v := variable.At("value"); v.IsPresent() {
				v.Path = "env " + name
				c.env[name] = v
			}
			if from := variable.At("valueFrom"); from.IsMap() && c.references != nil {
				from.Path = "env " + name
				c.references[name] = from
			}
		}
	}
}

// resolveVariables sets the variables of a container whose values are in ConfigMaps among the files.
// As in the kubelet, a variable of env replaces a variable of envFrom, and a later source an earlier
// one. It returns the variables whose values are unknown.
func (im *importer) resolveVariables(c container) (unknown map[string]source.Value) {
	unknown = make(map[string]source.Value)
	found := make(map[string]source.Value)
	for _, object := range c.sources {
		name := object.At("configMapRef", "name").Text()
		data, ok := im.configMaps[name]
		if name == "" || !ok || !data.IsMap() {
			im.notePodChange(object, "sets environment variables from an object that is not in the files; import the ConfigMap too, or write the variables of a Secret as values")
			continue
		}
		for key, field := range data.Fields() {
			found[object.At("prefix").Text()+key] = field
		}
	}
	for name, from := range c.references {
		ref := from.At("configMapKeyRef")
		v := im.configMaps[ref.At("name").Text()].At(ref.At("key").Text())
		if delete(found, name); v.IsText() {
			found[name] = v
			continue
		}
		unknown[name] = from
	}
	for name, v := range found {
		if _, ok := c.env[name]; !ok {
			c.env[name] = v
		}
	}
	return unknown
}

// importDocument reads a document, and reports whether its format is known.
func (im *importer) importDocument(v source.Value) (known bool, err error) {
	kind, version := v.At("kind").Text(), v.At("apiVersion").Text()
	switch {
	case v.IsList():
		return im.importList(v)
	case !v.IsMap():
		return false, nil
	case strings.HasSuffix(kind, "List") && v.At("items").IsList():
		return im.importEach(v.At("items").ListItems())
	case kind == "ConfigMap" && version == "v1":
		return im.configMap(v)
	}
	if f := im.recogniseFormat(v); f != nil {
		im.readDocument(f, v)
		return true, nil
	}
	if wrapped, ok := im.values(v); ok {
		known, err := im.importDocument(wrapped)
		im.chart = ""
		return known, err
	}
	if pod := podOf(v); pod.IsPresent() && im.importPod(v, pod) {
		return true, nil
	}
	if found := im.readNested(v, 0); len(found) > 0 {
		for _, field := range placementFields(v) {
			found = append(found, field.Path)
		}
		im.onlyRead(v, found)
		return true, nil
	}
	if plugins := im.unknownPlugins(v); len(plugins) > 0 {
		im.unknown = append(im.unknown, plugins...)
		return false, nil
	}
	if kind != "" && version != "" {
		im.unreadValues[v.File] = append(im.unreadValues[v.File], strings.TrimSpace(kind+" "+v.At("metadata", "name").Text()))
	}
	return false, nil
}

// pluginDir is the directory on the host with the kubelet's socket for device plugins.
const pluginDir = "/var/lib/kubelet/device-plugins"

// unknownPlugins returns the containers of an object that are device plugins of no known format: those
// with the kubelet's directory for device plugins, or with such a name. Each value is the container's
// image at the place of its name.
func (im *importer) unknownPlugins(v source.Value) (plugins []source.Value) {
	pod := podOf(v)
	if !runsOnNodes(v) || !pod.At("containers").IsList() {
		return nil
	}
	var volumes []string
	for _, volume := range pod.At("volumes").ListItems() {
		if strings.TrimSuffix(volume.At("hostPath", "path").Text(), "/") == pluginDir {
			volumes = append(volumes, volume.At("name").Text())
		}
	}
	for _, c := range containersOf(pod) {
		mounts := slices.ContainsFunc(c.At("volumeMounts").ListItems(), func(mount source.Value) bool {
			return slices.Contains(volumes, mount.At("name").Text())
		})
		if mounts || c.names("device-plugin", "device_plugin", "deviceplugin") {
			plugins = append(plugins, c.At("name").OrPlaceOf(c.Value).WithText(c.image))
		}
	}
	return plugins
}

// importEach reads documents, and reports whether at least one of them is known. In that case,
// documents with errors are only noted: a dump of all ConfigMaps of a namespace contains unrelated
// ones.
func (im *importer) importEach(documents []source.Value) (known bool, err error) {
	errs := make([]error, len(documents))
	for i, document := range documents {
		ok, err := im.importDocument(document)
		known, errs[i] = known || ok, err
	}
	if !known {
		return false, errors.Join(errs...)
	}
	for i, err := range errs {
		if err != nil {
			im.noteRemark(documents[i].WithText(documents[i].At("metadata", "name").Text()), "is not read: %v", err)
		}
	}
	return true, nil
}

// importList reads a list of arguments, of containers or of other documents.
func (im *importer) importList(v source.Value) (known bool, err error) {
	if f := im.recogniseFormat(v); f != nil {
		im.readDocument(f, v)
		return true, nil
	}
	if slices.ContainsFunc(v.ListItems(), source.Value.IsText) {
		return im.importContainer(container{args: v.ListItems(), env: make(map[string]source.Value)}), nil
	}
	if c, ok := patchedContainer(v); ok {
		return im.importContainer(c), nil
	}
	return im.importEach(v.ListItems())
}

// configMap reads the files of a ConfigMap.
func (im *importer) configMap(v source.Value) (known bool, err error) {
	im.configMapName = v.At("metadata", "name").Text()
	defer func() { im.configMapName = "" }()
	of := make(map[*format][]source.Value)
	var unread []source.Value
	var errs []error
	for _, data := range []source.Value{v.At("data"), v.At("stringData")} {
		for _, text := range data.Fields() {
			inside, err := source.ParseEmbedded(text)
			if err != nil && strings.ContainsAny(text.Node.Value, "{:") {
				errs = append(errs, source.ErrorInField(text.Path, err))
			}
			f := im.recogniseFormat(inside)
			if err != nil || f == nil {
				unread = append(unread, text)
				continue
			}
			of[f] = append(of[f], inside)
		}
	}
	for _, f := range im.formats {
		if len(of[f]) > 0 {
			im.importChosen(f, of[f])
			known = true
		}
	}
	for _, text := range unread {
		at := text.WithText("")
		if known {
			im.noteRemark(at, "is not a known configuration")
		}
	}
	if binary := v.At("binaryData"); !binary.IsNull() {
		im.noteRemark(binary, "is not text")
	}
	if known || im.variableMaps[im.configMapName] || im.importContainer(variablesIn(v.At("data"))) {
		return true, nil
	}
	return false, errors.Join(errs...)
}

// variablesIn returns a container with the environment variables of a ConfigMap.
func variablesIn(data source.Value) container {
	c := container{env: make(map[string]source.Value)}
	for name, v := range data.Fields() {
		if v.IsText() && name == strings.ToUpper(name) || strings.HasPrefix(name, "U30") {
			c.env[name] = v
		}
	}
	return c
}

// importChosen reads configurations of one format. If each of them applies to some nodes only,
// their entries are limited to those nodes.
func (im *importer) importChosen(f *format, configurations []source.Value) {
	for _, c := range configurations {
		im.seen = append(im.seen, c.FieldName())
	}
	objects := slices.ContainsFunc(configurations, func(c source.Value) bool { return c.Has("kind") })
	byOperator := im.operator && f.label != "" && im.options.Named == ""
	byStrategy := im.fallbacks.IsPresent() && im.byDefault.Text() == "" && !im.operator && f.label != "" && im.options.Named == ""
	if !f.alternatives || len(configurations) == 1 && !byOperator && !byStrategy || objects {
		for _, c := range configurations {
			im.readDocument(f, c)
		}
		return
	}
	find := func(names ...string) int {
		return slices.IndexFunc(configurations, func(c source.Value) bool { return slices.Contains(names, c.FieldName()) })
	}
	i := find(im.options.Named)
	usual := find(im.byDefault.Text())
	if byStrategy {
		var ok bool
		if usual, ok = fallback(im.fallbacks.ListTexts(), configurations); !ok {
			im.notePodChange(im.fallbacks, "no strategy selects a configuration for nodes without the label %s: the plugin does not start there, and Chandler offers their GPUs unshared", f.label)
		}
	} else if usual < 0 && im.byDefault.Text() != "" && f.label != "" && im.options.Named == "" {
		// cmd/config-manager of NVIDIA/k8s-device-plugin stops with this error
		im.notePodChange(im.byDefault, "no configuration has this name: the plugin does not start on nodes without the label %s, and Chandler offers their GPUs unshared", f.label)
	} else if usual < 0 && !byOperator {
		usual = find("default", "config.json", "config.yaml")
	}
	switch {
	case im.options.Named == "" && f.label != "":
		im.byLabel(f, configurations, usual)
		return
	case i < 0 && usual < 0 && !slices.ContainsFunc(configurations, func(c source.Value) bool { return !isNodeName(c.FieldName()) }):
		for _, c := range groupAlike(configurations) {
			c.value.Nodes = &v1alpha1.Nodes{Names: c.names}
			im.readDocument(f, c.value)
		}
		return
	case i < 0:
		i = max(0, usual)
	}
	im.readDocument(f, configurations[i])
	for j, c := range configurations {
		if j != i && c.Short() != configurations[i].Short() {
			im.otherNode(c, c.FieldName(), configurations[i].FieldName())
		}
	}
}

// fallback returns the index of the configuration that the strategies select for nodes without a
// label, below 0 for the empty configuration. It reports false if no strategy selects one
// (updateConfigName in cmd/config-manager of NVIDIA/k8s-device-plugin v0.20).
func fallback(strategies []string, configurations []source.Value) (int, bool) {
	for strategy := range strings.SplitSeq(strings.Join(strategies, ","), ",") {
		switch strings.TrimSpace(strategy) {
		case "named":
			if i := slices.IndexFunc(configurations, func(c source.Value) bool { return c.FieldName() == "default" }); i >= 0 {
				return i, true
			}
		case "single":
			if len(configurations) == 1 {
				return 0, true
			}
		case "empty":
			return -1, true
		default:
			return -1, false
		}
	}
	return -1, false
}

// byLabel reads configurations that a node label selects by name. The configuration with the index
// usual applies to nodes without the label; no configuration does if usual is below 0.
func (im *importer) byLabel(f *format, configurations []source.Value, usual int) {
	var labelled []string // the names of the configurations that need the label
	label := func(operator metav1.LabelSelectorOperator, names []string) *v1alpha1.Nodes {
		if operator == metav1.LabelSelectorOpIn && len(names) == 1 {
			return &v1alpha1.Nodes{MatchLabels: map[string]string{f.label: names[0]}}
		}
		return &v1alpha1.Nodes{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: f.label, Operator: operator, Values: names}}}
	}
	var rest *source.Value
	for _, c := range groupAlike(configurations) {
		if usual >= 0 && slices.Contains(c.names, configurations[usual].FieldName()) {
			rest = &c.value
			continue
		}
		labelled = append(labelled, c.names...)
		c.value.Nodes = label(metav1.LabelSelectorOpIn, c.names)
		im.readDocument(f, c.value)
	}
	if rest == nil {
		rest = &source.Value{File: configurations[0].File}
	}
	if len(labelled) > 0 {
		rest.Nodes = label(metav1.LabelSelectorOpNotIn, labelled)
	}
	im.readDocument(f, *rest)
}

// configuration is a configuration with all of its names.
type configuration struct {
	value source.Value
	names []string
}

// groupAlike groups configurations with the same content.
func groupAlike(configurations []source.Value) (all []*configuration) {
	by := make(map[string]*configuration)
	for _, c := range configurations {
		text, err := yaml.Marshal(c.Node)
		if err == nil && by[string(text)] != nil {
			by[string(text)].names = append(by[string(text)].names, c.FieldName())
			continue
		}
		one := &configuration{c, []string{c.FieldName()}}
		by[string(text)], all = one, append(all, one)
	}
	return all
}

// isNodeName reports whether a file name in a ConfigMap can be a node name. The SR-IOV operator
// names the files after nodes.
func isNodeName(name string) bool {
	return len(validation.IsDNS1123Subdomain(name)) == 0 && !slices.Contains([]string{".json", ".yaml", ".yml", ".conf", ".txt"}, path.Ext(name))
}

// otherNode notes a configuration that is not imported because its nodes are unknown.
func (im *importer) otherNode(v source.Value, name, instead string) {
	at := v.WithText("")
	im.notePodChange(at, "is another configuration for some nodes; %s is imported, and this one with --named=%s", instead, name)
}

// podOf returns the pod spec of a workload, or the zero value.
func podOf(v source.Value) source.Value {
	for _, at := range [][]string{
		{"spec", "jobTemplate", "spec", "template", "spec"},
		{"spec", "template", "spec"},
		{"template", "spec"},
		{"spec"},
		{},
	} {
		if pod := v.At(at...); pod.At("containers").IsList() || pod.At("initContainers").IsList() {
			return pod
		}
	}
	if v.HasAny(source.ArgsField, "command") || v.At(source.EnvField).IsList() {
		return v
	}
	return source.Value{}
}

// importPod reads the containers of an object with a pod spec, and reports whether one of them runs
// a plugin.
func (im *importer) importPod(object, pod source.Value) (known bool) {
	if !pod.HasAny("containers", "initContainers") {
		return im.importContainer(containerOf(pod))
	}
	var scope *[]*v1alpha1.Nodes
	if runsOnNodes(object) {
		terms := im.placement(pod, nil)
		scope = &terms
	}
	owned := im.workloads[ownerOf(object)]
	for _, c := range containersOf(pod) {
		switch f := im.runsIn(c); {
		case f == nil:
		case owned:
			known = true // the DaemonSet has the same containers
		default:
			im.readContainer(f, c, scope)
			known = true
		}
	}
	return known
}

// containersOf returns the containers of a pod.
func containersOf(pod source.Value) (containers []container) {
	for _, c := range slices.Concat(pod.At("initContainers").ListItems(), pod.At("containers").ListItems()) {
		containers = append(containers, containerOf(c))
	}
	return containers
}

// importContainer reads a container, and reports whether it runs a plugin.
func (im *importer) importContainer(c container) bool {
	f := im.runsIn(c)
	if f != nil {
		im.readContainer(f, c, im.around)
	}
	return f != nil
}

// runsIn returns the format of the plugin that a container runs, nil if there is none.
func (im *importer) runsIn(c container) *format {
	for _, f := range im.formats {
		if f.runs != nil && f.runs(c) {
			return f
		}
	}
	return nil
}

// readContainer reads a container that runs a plugin. If scope is not nil, its terms are the nodes
// of the container.
func (im *importer) readContainer(f *format, c container, scope *[]*v1alpha1.Nodes) {
	if scope != nil && (f.companion == nil || !f.companion(c)) {
		f = im.formatOn(f, *scope)
	}
	im.found[f.name], im.current = true, f
	if f.runsAt == nil {
		at := c.At("name").OrPlaceOf(c.Value)
		f.runsAt = &at
	}
	f.container(c)
}
