// Package hostdevices reads the configurations of plugins that offer the devices of a list: the paths and
// USB devices of generic-device-plugin, and the permitted host devices of KubeVirt.
package hostdevices

import (
	"cmp"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/draft"
	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
)

// squat reads configurations of squat's generic-device-plugin (config.go and deviceplugin in
// squat/generic-device-plugin).
type squat struct {
	im          *plugin.Import
	settings    *plugin.Settings
	devices     []source.Value          // of all files and arguments
	image       string                  // "" if unknown
	taken       map[string]source.Value // the first path to a device node of each family
	container   source.Value            // the container
	domainNoted bool                    // the note about the uncertain domain exists
}

// NewSquat returns the format of squat's generic-device-plugin.
func NewSquat(im *plugin.Import) *plugin.Format {
	s := &squat{im: im, taken: make(map[string]source.Value)}
	s.settings = plugin.NewSettings(im, []plugin.Option{
		{Name: "domain", Field: "domain", Fate: plugin.FateCarried},
		{Name: "device", Repeatable: true, Fate: plugin.FateCarried},
		{Name: "config", Harmless: []string{"/etc/generic-device-plugin/config.yaml"}, Reason: "import that file too, if it is not among the files"},
		{Name: "config-file", Harmless: []string{"/etc/generic-device-plugin/config.yaml"}, Reason: "import that file too, if it is not among the files"},
		{Name: "plugin-directory", Field: "plugin-directory", Reason: "the agent has a flag for the kubelet's directory"},
		{Field: "status", Harmless: []string{"enabled"}, Reason: "the agent offers what the configuration names"},
		{Name: "listen", Field: "listen", Reason: "the agent has metrics of its own"},
		{Name: "log-level", Field: "log-level", Reason: "the agent has flags for its log"},
		{Field: "device", Repeatable: true, Fate: plugin.FateCarried},
		{Field: "devices", Repeatable: true, Fate: plugin.FateCarried},
	})
	return &plugin.Format{
		Name:          "squat's generic-device-plugin",
		Forms:         "configuration file, --device arguments, DaemonSet",
		Families:      []string{"paths"},
		IsDocument:    s.is,
		ReadDocument:  s.read,
		IsContainer:   s.runsPlugin,
		ReadContainer: s.readContainer,
		Finish:        s.finishSettings,
	}
}

func (s *squat) runsPlugin(c plugin.Container) bool {
	return c.HasName("generic-device-plugin") || c.HasFlag("device") && !c.HasName("docker", "podman", "nerdctl", "intel", "nvidia")
}

func (s *squat) is(v source.Value) bool {
	for _, list := range []source.Value{v, v.At("devices"), v.At("device")} {
		if list.IsList() && len(list.Node.Content) > 0 && isDevice(list.ListItems()[0]) {
			return true
		}
	}
	return isDevice(v)
}

// isDevice recognises a value of --device.
func isDevice(v source.Value) bool {
	groups := v.At("groups")
	return v.HasAny("name", "type") && (groups.IsList() && len(groups.Node.Content) > 0 && groups.ListItems()[0].HasAny("paths", "usb", "usbs") || v.At("paths").IsList() && v.Has("type"))
}

func (s *squat) read(v source.Value) {
	if v.IsList() {
		s.devices = append(s.devices, v.ListItems()...)
		return
	}
	if isDevice(v) {
		s.devices = append(s.devices, v)
		return
	}
	s.settings.ReadFields(v, plugin.OwnField, s.im.Notes.AddUnknownField)
	s.devices = append(s.devices, v.At("devices").ListItems()...)
	s.devices = append(s.devices, v.At("device").ListItems()...)
}

func (s *squat) readContainer(c plugin.Container) {
	s.image, s.container = c.Image, c.At("name").OrPlaceOf(c.Value)
	for _, arg := range source.SplitArguments(c.Args, func(string) bool { return false }) {
		if arg.Name == "device" && !arg.Alone {
			s.devices = append(s.devices, s.readArgument(arg.Value)...)
		}
	}
	s.settings.ReadFlags(c)
}

// readArgument reads a value of --device: YAML, JSON, or the oldest form, a name and paths
// separated by commas.
func (s *squat) readArgument(v source.Value) []source.Value {
	if strings.Contains(v.Node.Value, "{{") {
		return nil // the flags note it
	}
	if inside, err := source.ParseEmbedded(v); err == nil && inside.IsMap() {
		inside.Path = "--device"
		return []source.Value{inside}
	}
	name, paths, ok := strings.Cut(v.Text(), ",")
	if !ok {
		s.im.Notes.AddPodChange(v, "is neither YAML nor JSON")
		return nil
	}
	list := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Line: v.Node.Line}
	for p := range strings.SplitSeq(paths, ",") {
		list.Content = append(list.Content, yamlnode.NewScalar(p, v.Node.Line))
	}
	v.Node = yamlnode.NewObject(v.Node.Line, "type", yamlnode.NewScalar(name, v.Node.Line), "paths", list)
	return []source.Value{v}
}

func (s *squat) finishSettings() {
	s.settings.FinishOptions()
	if len(s.devices) == 0 {
		s.im.Notes.AddPodChange(s.container, "which devices the plugin offers is in a file that is not among those imported")
	}
	for _, device := range s.devices {
		for _, domain := range s.domainsOf(device) {
			s.readDevice(domain, device)
		}
	}
	s.makeRoom()
}

// The default domains of resources: that of MicroShift, whose configuration contains the plugin's,
// and those of the plugin before release 0.2 and since (squat/generic-device-plugin#75).
const (
	microshift     = "genericDevicePlugin"
	ofMicroshift   = "device.microshift.io"
	ofSquat        = "squat.ai"
	ofSquatSince02 = "devic.es"
)

// releaseVersion matches the version of a release.
var releaseVersion = regexp.MustCompile(`^v?[0-9]+\.[0-9]+`)

// before02 matches versions before release 0.2.
var before02 = regexp.MustCompile(`^v?0\.[01](?:\.|$|-)`)

// domainsOf returns the domains of a device's resource: both if the release is unknown, because the
// image is not in the files, or has a digest or a tag that is not a version.
func (s *squat) domainsOf(v source.Value) []string {
	domain, version := s.settings.Get("domain").Text(), plugin.ImageVersion(s.image)
	latest := version == "latest" || version == "" && !strings.Contains(s.image, "@")
	switch {
	case domain != "":
		return []string{domain}
	case strings.Contains(v.Path, microshift):
		return []string{ofMicroshift}
	case s.image != "" && (latest || releaseVersion.MatchString(version) && !before02.MatchString(version)):
		return []string{ofSquatSince02}
	case before02.MatchString(version):
		return []string{ofSquat}
	case !s.domainNoted:
		release := "the release of the plugin is unknown, because its image is not in the files"
		if s.image != "" {
			release = "the release of " + s.image + " is unknown"
		}
		s.im.Notes.AddPodChange(s.container.OrPlaceOf(v), "%s: resources are %s/… before release 0.2 and %s/… since. Both are written; delete the entries that pods do not request, or set the flag --domain", release, ofSquat, ofSquatSince02)
		s.domainNoted = true
	}
	return []string{ofSquat, ofSquatSince02}
}

// readDevice reads the devices of one resource name.
func (s *squat) readDevice(domain string, v source.Value) {
	s.im.Notes.AddUnknownExcept(v, "name", "groups", "type", "paths", "count")
	entry := v1alpha1.PathResource{Name: domain + "/" + cmp.Or(v.At("name").Text(), v.At("type").Text())}
	for _, group := range v.At("groups").ListItems() {
		if g, ok := s.group(group); ok {
			entry.Groups = append(entry.Groups, g)
		}
	}
	for _, one := range v.At("paths").ListItems() { // the format before groups existed
		if p, ok := s.path(one); ok {
			entry.Groups = append(entry.Groups, v1alpha1.PathGroup{Paths: []v1alpha1.Path{p}, Count: s.count(v)})
		}
	}
	if len(entry.Groups) == 0 {
		s.im.Notes.AddPodChange(v, "offers nothing")
		return
	}
	s.im.Config.AddPaths(v, entry)
}

func (s *squat) group(v source.Value) (v1alpha1.PathGroup, bool) {
	s.im.Notes.AddUnknownExcept(v, "paths", "usb", "usbs", "count")
	group := v1alpha1.PathGroup{Count: s.count(v)}
	for _, one := range v.At("paths").ListItems() {
		p, ok := s.path(one)
		if !ok {
			return group, false
		}
		group.Paths = append(group.Paths, p)
	}
	for _, one := range slices.Concat(v.At("usb").ListItems(), v.At("usbs").ListItems()) {
		s.im.Notes.AddUnknownExcept(one, "vendor", "product", "serial")
		group.USB = append(group.USB, usbDevice(one))
	}
	if len(group.Paths) == 0 && len(group.USB) == 0 {
		s.im.Notes.AddPodChange(v, "names neither paths nor USB devices")
		return group, false
	}
	return group, true
}

// count returns the number of containers that share a device.
func (s *squat) count(v source.Value) int {
	at := v.At("count")
	count, ok := at.AsInteger()
	switch {
	case !at.IsPresent():
		return 0
	case !ok || count < 0:
		s.im.Notes.AddPodChange(at, "is not a number")
		return 0
	case count > draft.MaxShares:
		s.im.Notes.AddRemark(at, "is more than the %d containers at once that can be written, and than a node has", draft.MaxShares)
		return draft.MaxShares
	case count == 1:
		return 0 // the default
	}
	return count
}

// path reads a path: an object, or a string alone.
func (s *squat) path(v source.Value) (v1alpha1.Path, bool) {
	p := v1alpha1.Path{Path: v.Text()}
	if v.IsMap() {
		s.im.Notes.AddUnknownExcept(v, "path", "mountPath", "permissions", "readOnly", "type", "limit", "optional")
		p = v1alpha1.Path{Path: v.At("path").Text(), MountPath: v.At("mountPath").Text(), Permissions: v.At("permissions").Text(), Optional: v.At("optional").IsTrue()}
		p.Limit, _ = v.At("limit").AsInteger()
		if strings.EqualFold(v.At("type").Text(), string(v1alpha1.PathTypeMount)) {
			p.Type, p.ReadOnly, p.Permissions = v1alpha1.PathTypeMount, v.At("readOnly").IsTrue(), ""
		}
	}
	if p.Limit <= 1 {
		p.Limit = 0 // the default
	}
	p.Limit = min(p.Limit, draft.MaxShares)
	if p.Path == "" {
		s.im.Notes.AddPodChange(v, "names no path")
		return p, false
	}
	p.Path = path.Clean(p.Path)
	if !strings.HasPrefix(p.Path, "/dev/") {
		s.im.Notes.AddRemark(v, "has to be mounted into the agent's pod, which sees only /dev")
	}
	s.takeFamilies(v, p.Path)
	return p, true
}

// nodeFamilies lists the families that offer device nodes themselves, by path prefix. A node that a
// family offers is not offered by its path too.
var nodeFamilies = []struct {
	prefix   string
	families []string
}{
	{"/dev/dri", []string{"amdgpu", "generic", "intelgpu"}},
	{"/dev/kfd", []string{"amdgpu"}},
	{"/dev/nvidia", []string{"nvidia"}},
	{"/dev/accel", []string{"gaudi", "npu", "tpu"}},
	{"/dev/infiniband", []string{"rdma"}},
	{"/dev/vfio", []string{"qat", "sriovnet", "vfio"}},
	{"/dev/tenstorrent", []string{"tenstorrent"}},
	{"/dev/neuron", []string{"neuron"}},
	{"/dev/dlb", []string{"dlb"}},
	{"/dev/cxi", []string{"slingshot"}},
	{"/dev/dsa", []string{"idxd"}},
	{"/dev/iax", []string{"idxd"}},
}

// takeFamilies stores the families whose nodes are offered by path.
func (s *squat) takeFamilies(v source.Value, p string) {
	for _, nodes := range nodeFamilies {
		if !strings.HasPrefix(p, nodes.prefix) {
			continue
		}
		for _, family := range nodes.families {
			if !s.taken[family].IsPresent() {
				s.taken[family] = v
			}
		}
	}
}

// makeRoom excludes the families whose nodes are offered by path, unless another imported plugin
// offers them.
func (s *squat) makeRoom() {
	var families []string
	for _, family := range slices.Sorted(maps.Keys(s.taken)) {
		if s.im.OffersFamily(family) {
			s.im.Notes.AddPodChange(source.Value{}, "devices of family %s are offered by their own names, and so their nodes are not by their paths", family)
			continue
		}
		families = append(families, family)
	}
	if len(families) > 0 {
		from := s.taken[families[0]]
		from.Path += ": offered by its path instead"
		s.im.Config.AddExclude(from, expression.OneOf(expression.Family, families))
	}
}
