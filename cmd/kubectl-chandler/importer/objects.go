package importer

import (
	"errors"
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

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
		im.Chart = ""
		return known, err
	}
	if pod := podOf(v); pod.IsPresent() && im.importPod(v, pod) {
		return true, nil
	}
	if found := im.readNested(v, 0); len(found) > 0 {
		for _, field := range plugin.PlacementFields(v) {
			found = append(found, field.Path)
		}
		im.Notes.AddOnlyRead(v, found)
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
		if mounts || c.HasName("device-plugin", "device_plugin", "deviceplugin") {
			plugins = append(plugins, c.At("name").OrPlaceOf(c.Value).WithText(c.Image))
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
			im.Notes.AddRemark(documents[i].WithText(documents[i].At("metadata", "name").Text()), "is not read: %v", err)
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
		return im.importContainer(plugin.Container{Args: v.ListItems(), Env: make(map[string]source.Value)}), nil
	}
	if c, ok := patchedContainer(v); ok {
		return im.importContainer(c), nil
	}
	return im.importEach(v.ListItems())
}

// configMap reads the files of a ConfigMap.
func (im *importer) configMap(v source.Value) (known bool, err error) {
	im.ConfigMapName = v.At("metadata", "name").Text()
	defer func() { im.ConfigMapName = "" }()
	of := make(map[*plugin.Format][]source.Value)
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
	for _, f := range im.Formats {
		if len(of[f]) > 0 {
			im.importChosen(f, of[f])
			known = true
		}
	}
	for _, text := range unread {
		at := text.WithText("")
		if known {
			im.Notes.AddRemark(at, "is not a known configuration")
		}
	}
	if binary := v.At("binaryData"); !binary.IsNull() {
		im.Notes.AddRemark(binary, "is not text")
	}
	if known || im.variableMaps[im.ConfigMapName] || im.importContainer(variablesIn(v.At("data"))) {
		return true, nil
	}
	return false, errors.Join(errs...)
}

// variablesIn returns a container with the environment variables of a ConfigMap.
func variablesIn(data source.Value) plugin.Container {
	c := plugin.Container{Env: make(map[string]source.Value)}
	for name, v := range data.Fields() {
		if v.IsText() && name == strings.ToUpper(name) || strings.HasPrefix(name, "U30") {
			c.Env[name] = v
		}
	}
	return c
}

// importChosen reads configurations of one format. If each of them applies to some nodes only,
// their entries are limited to those nodes.
func (im *importer) importChosen(f *plugin.Format, configurations []source.Value) {
	for _, c := range configurations {
		im.seen = append(im.seen, c.FieldName())
	}
	objects := slices.ContainsFunc(configurations, func(c source.Value) bool { return c.Has("kind") })
	byOperator := im.operator && f.Label != "" && im.options.Named == ""
	byStrategy := im.fallbacks.IsPresent() && im.byDefault.Text() == "" && !im.operator && f.Label != "" && im.options.Named == ""
	if !f.Alternatives || len(configurations) == 1 && !byOperator && !byStrategy || objects {
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
		if usual, ok = fallbackIndex(im.fallbacks.ListTexts(), configurations); !ok {
			im.Notes.AddPodChange(im.fallbacks, "no strategy selects a configuration for nodes without the label %s: the plugin does not start there, and Chandler offers their GPUs unshared", f.Label)
		}
	} else if usual < 0 && im.byDefault.Text() != "" && f.Label != "" && im.options.Named == "" {
		// cmd/config-manager of NVIDIA/k8s-device-plugin stops with this error
		im.Notes.AddPodChange(im.byDefault, "no configuration has this name: the plugin does not start on nodes without the label %s, and Chandler offers their GPUs unshared", f.Label)
	} else if usual < 0 && !byOperator {
		usual = find("default", "config.json", "config.yaml")
	}
	switch {
	case im.options.Named == "" && f.Label != "":
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

// fallbackIndex returns the index of the configuration that the strategies select for nodes without a
// label, below 0 for the empty configuration. It reports false if no strategy selects one
// (updateConfigName in cmd/config-manager of NVIDIA/k8s-device-plugin v0.20).
func fallbackIndex(strategies []string, configurations []source.Value) (int, bool) {
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
func (im *importer) byLabel(f *plugin.Format, configurations []source.Value, usual int) {
	var labelled []string // the names of the configurations that need the label
	label := func(operator metav1.LabelSelectorOperator, names []string) *v1alpha1.Nodes {
		if operator == metav1.LabelSelectorOpIn && len(names) == 1 {
			return &v1alpha1.Nodes{MatchLabels: map[string]string{f.Label: names[0]}}
		}
		return &v1alpha1.Nodes{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: f.Label, Operator: operator, Values: names}}}
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
	im.Notes.AddPodChange(at, "is another configuration for some nodes; %s is imported, and this one with --named=%s", instead, name)
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
		return im.importContainer(plugin.ContainerOf(pod))
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
func containersOf(pod source.Value) (containers []plugin.Container) {
	for _, c := range slices.Concat(pod.At("initContainers").ListItems(), pod.At("containers").ListItems()) {
		containers = append(containers, plugin.ContainerOf(c))
	}
	return containers
}

// importContainer reads a container, and reports whether it runs a plugin.
func (im *importer) importContainer(c plugin.Container) bool {
	f := im.runsIn(c)
	if f != nil {
		im.readContainer(f, c, im.around)
	}
	return f != nil
}

// runsIn returns the format of the plugin that a container runs, nil if there is none.
func (im *importer) runsIn(c plugin.Container) *plugin.Format {
	for _, f := range im.Formats {
		if f.IsContainer != nil && f.IsContainer(c) {
			return f
		}
	}
	return nil
}

// readContainer reads a container that runs a plugin. If scope is not nil, its terms are the nodes
// of the container.
func (im *importer) readContainer(f *plugin.Format, c plugin.Container, scope *[]*v1alpha1.Nodes) {
	if scope != nil && (f.IsCompanion == nil || !f.IsCompanion(c)) {
		f = im.formatOn(f, *scope)
	}
	im.Found[f.Name], im.Config.Scope = true, f.Scope
	if f.FoundIn == nil {
		at := c.At("name").OrPlaceOf(c.Value)
		f.FoundIn = &at
	}
	f.ReadContainer(c)
}
