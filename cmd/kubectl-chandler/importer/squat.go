package importer

import (
	"cmp"
	"path"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/api/v1alpha1"
)

// squat reads configurations of squat's generic-device-plugin (config.go and deviceplugin in
// squat/generic-device-plugin).
type squat struct {
	im          *importer
	settings    *settings
	devices     []value          // of all files and arguments
	image       string           // "" if unknown
	taken       map[string]value // the first path to a device node of each family
	container   value            // the container
	domainNoted bool             // the note about the uncertain domain exists
}

func newSquat(im *importer) *format {
	s := &squat{im: im, taken: make(map[string]value)}
	s.settings = newSettings(im, []option{
		{name: "domain", at: "domain", fate: fateCarried},
		{name: "device", many: true, fate: fateCarried},
		{name: "config", fine: []string{"/etc/generic-device-plugin/config.yaml"}, why: "import that file too, if it is not among the files"},
		{name: "config-file", fine: []string{"/etc/generic-device-plugin/config.yaml"}, why: "import that file too, if it is not among the files"},
		{name: "plugin-directory", at: "plugin-directory", why: "the agent has a flag for the kubelet's directory"},
		{at: "status", fine: []string{"enabled"}, why: "the agent offers what the configuration names"},
		{name: "listen", at: "listen", why: "the agent has metrics of its own"},
		{name: "log-level", at: "log-level", why: "the agent has flags for its log"},
		{at: "device", many: true, fate: fateCarried},
		{at: "devices", many: true, fate: fateCarried},
	})
	return &format{
		name:      "squat's generic-device-plugin",
		forms:     "configuration file, --device arguments, DaemonSet",
		families:  []string{"paths"},
		is:        s.is,
		read:      s.read,
		runs:      s.runsPlugin,
		container: s.readContainer,
		finish:    s.finishSettings,
	}
}

func (s *squat) runsPlugin(c container) bool {
	return c.names("generic-device-plugin") || c.hasFlag("device") && !c.names("docker", "podman", "nerdctl", "intel", "nvidia")
}

func (s *squat) is(v value) bool {
	for _, list := range []value{v, v.at("devices"), v.at("device")} {
		if list.isList() && len(list.node.Content) > 0 && isDevice(list.items()[0]) {
			return true
		}
	}
	return isDevice(v)
}

// isDevice recognises a value of --device.
func isDevice(v value) bool {
	groups := v.at("groups")
	return v.hasAny("name", "type") && (groups.isList() && len(groups.node.Content) > 0 && groups.items()[0].hasAny("paths", "usb", "usbs") || v.at("paths").isList() && v.has("type"))
}

func (s *squat) read(v value) {
	if v.isList() {
		s.devices = append(s.devices, v.items()...)
		return
	}
	if isDevice(v) {
		s.devices = append(s.devices, v)
		return
	}
	s.settings.file(v, inOwn, s.im.noteUnknown)
	s.devices = append(s.devices, v.at("devices").items()...)
	s.devices = append(s.devices, v.at("device").items()...)
}

func (s *squat) readContainer(c container) {
	s.image, s.container = c.image, cmpValue(c.at("name"), c.value)
	for _, arg := range splitArguments(c.args, func(string) bool { return false }) {
		if arg.name == "device" && !arg.alone {
			s.devices = append(s.devices, s.readArgument(arg.value)...)
		}
	}
	s.settings.flags(c)
}

// readArgument reads a value of --device: YAML, JSON, or the oldest form, a name and paths
// separated by commas.
func (s *squat) readArgument(v value) []value {
	if strings.Contains(v.node.Value, "{{") {
		return nil // the flags note it
	}
	if inside, err := embedded(v); err == nil && inside.isMap() {
		inside.path = "--device"
		return []value{inside}
	}
	name, paths, ok := strings.Cut(v.text(), ",")
	if !ok {
		s.im.notePodChange(v, "is neither YAML nor JSON")
		return nil
	}
	list := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Line: v.node.Line}
	for p := range strings.SplitSeq(paths, ",") {
		list.Content = append(list.Content, newScalar(p, v.node.Line))
	}
	v.node = newObject(v.node.Line, "type", newScalar(name, v.node.Line), "paths", list)
	return []value{v}
}

func (s *squat) finishSettings() {
	s.settings.finishOptions()
	if len(s.devices) == 0 {
		s.im.notePodChange(s.container, "which devices the plugin offers is in a file that is not among those imported")
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
func (s *squat) domainsOf(v value) []string {
	domain, version := s.settings.get("domain").text(), imageVersion(s.image)
	latest := version == "latest" || version == "" && !strings.Contains(s.image, "@")
	switch {
	case domain != "":
		return []string{domain}
	case strings.Contains(v.path, microshift):
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
		s.im.notePodChange(cmpValue(s.container, v), "%s: resources are %s/… before release 0.2 and %s/… since. Both are written; delete the entries that pods do not request, or set the flag --domain", release, ofSquat, ofSquatSince02)
		s.domainNoted = true
	}
	return []string{ofSquat, ofSquatSince02}
}

// readDevice reads the devices of one resource name.
func (s *squat) readDevice(domain string, v value) {
	s.im.unknownExcept(v, "name", "groups", "type", "paths", "count")
	entry := v1alpha1.PathResource{Name: domain + "/" + cmp.Or(v.at("name").text(), v.at("type").text())}
	for _, group := range v.at("groups").items() {
		if g, ok := s.group(group); ok {
			entry.Groups = append(entry.Groups, g)
		}
	}
	for _, one := range v.at("paths").items() { // the format before groups existed
		if p, ok := s.path(one); ok {
			entry.Groups = append(entry.Groups, v1alpha1.PathGroup{Paths: []v1alpha1.Path{p}, Count: s.count(v)})
		}
	}
	if len(entry.Groups) == 0 {
		s.im.notePodChange(v, "offers nothing")
		return
	}
	s.im.addPaths(v, entry)
}

func (s *squat) group(v value) (v1alpha1.PathGroup, bool) {
	s.im.unknownExcept(v, "paths", "usb", "usbs", "count")
	group := v1alpha1.PathGroup{Count: s.count(v)}
	for _, one := range v.at("paths").items() {
		p, ok := s.path(one)
		if !ok {
			return group, false
		}
		group.Paths = append(group.Paths, p)
	}
	for _, one := range slices.Concat(v.at("usb").items(), v.at("usbs").items()) {
		s.im.unknownExcept(one, "vendor", "product", "serial")
		group.USB = append(group.USB, usbDevice(one))
	}
	if len(group.Paths) == 0 && len(group.USB) == 0 {
		s.im.notePodChange(v, "names neither paths nor USB devices")
		return group, false
	}
	return group, true
}

// count returns the number of containers that share a device.
func (s *squat) count(v value) int {
	at := v.at("count")
	count, ok := at.number()
	switch {
	case !at.isPresent():
		return 0
	case !ok || count < 0:
		s.im.notePodChange(at, "is not a number")
		return 0
	case count > maxShares:
		s.im.noteRemark(at, "is more than the %d containers at once that can be written, and than a node has", maxShares)
		return maxShares
	case count == 1:
		return 0 // the default
	}
	return count
}

// path reads a path: an object, or a string alone.
func (s *squat) path(v value) (v1alpha1.Path, bool) {
	p := v1alpha1.Path{Path: v.text()}
	if v.isMap() {
		s.im.unknownExcept(v, "path", "mountPath", "permissions", "readOnly", "type", "limit", "optional")
		p = v1alpha1.Path{Path: v.at("path").text(), MountPath: v.at("mountPath").text(), Permissions: v.at("permissions").text(), Optional: v.at("optional").is()}
		p.Limit, _ = v.at("limit").number()
		if strings.EqualFold(v.at("type").text(), string(v1alpha1.PathTypeMount)) {
			p.Type, p.ReadOnly, p.Permissions = v1alpha1.PathTypeMount, v.at("readOnly").is(), ""
		}
	}
	if p.Limit <= 1 {
		p.Limit = 0 // the default
	}
	p.Limit = min(p.Limit, maxShares)
	if p.Path == "" {
		s.im.notePodChange(v, "names no path")
		return p, false
	}
	p.Path = path.Clean(p.Path)
	if !strings.HasPrefix(p.Path, "/dev/") {
		s.im.noteRemark(v, "has to be mounted into the agent's pod, which sees only /dev")
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
func (s *squat) takeFamilies(v value, p string) {
	for _, nodes := range nodeFamilies {
		if !strings.HasPrefix(p, nodes.prefix) {
			continue
		}
		for _, family := range nodes.families {
			if !s.taken[family].isPresent() {
				s.taken[family] = v
			}
		}
	}
}

// makeRoom excludes the families whose nodes are offered by path, unless another imported plugin
// offers them.
func (s *squat) makeRoom() {
	wanted := make(map[string]bool)
	for _, f := range s.im.formats {
		for _, family := range f.families {
			wanted[family] = wanted[family] || s.im.found[f.name]
		}
	}
	var families []string
	for _, family := range sorted(s.taken) {
		if wanted[family] {
			s.im.notePodChange(value{}, "devices of family %s are offered by their own names, and so their nodes are not by their paths", family)
			continue
		}
		families = append(families, family)
	}
	if len(families) > 0 {
		from := s.taken[families[0]]
		from.path += ": offered by its path instead"
		s.im.addExclude(from, oneOf(familyAttribute, families))
	}
}
