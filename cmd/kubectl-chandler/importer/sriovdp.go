package importer

import (
	"cmp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/api/v1alpha1"
)

// sriovdp reads configurations of the SR-IOV network device plugin (README.md and pkg/types in
// k8snetworkplumbingwg/sriov-network-device-plugin v3.9).
type sriovdp struct {
	im       *importer
	settings *settings
	pools    []value // of all files
	policies []value // SriovNetworkNodePolicies
	operator []value // the pools of the operator's ConfigMap
	ran      bool    // a container runs the plugin, and its flags set the prefix
}

func newSRIOV(im *importer) *format {
	s := &sriovdp{im: im}
	s.settings = newSettings(im, []option{
		{name: "resource-prefix", fate: fateCarried},
		{name: "config-file", fine: []string{"/etc/pcidp/config.json"}, why: "import that file too, if it is not among the files"},
		{name: "use-cdi", alone: true, fine: []string{"false"}, why: "containers get the same device nodes without it"},
	})
	return &format{
		name:         "the SR-IOV network device plugin",
		forms:        "config.json alone, in a ConfigMap or a NicClusterPolicy, flags, DaemonSet, Helm values, SriovNetworkNodePolicy",
		families:     []string{"sriovnet", "rdma", "vfio"},
		alternatives: true,
		needs:        true,
		is:           s.is,
		read:         s.read,
		runs:         s.runsPlugin,
		container: func(c container) {
			s.ran = true
			s.settings.flags(c)
		},
		finish: s.finishSettings,
	}
}

func (s *sriovdp) runsPlugin(c container) bool {
	return c.names("sriov-network-device-plugin", "sriov-device-plugin", "sriovdp", "sriov-dp") || c.image == "" && c.hasFlag("resource-prefix")
}

func (s *sriovdp) is(v value) bool {
	return v.respell("resourceList").has("resourceList") || isNodePolicy(v) || isSection(v, "sriovDevicePlugin") || isOperatorValues(v)
}

// isOperatorValues recognises values of the operator's chart that set the plugin's resource prefix.
func isOperatorValues(v value) bool {
	return v.at("operator", "resourcePrefix").isText() && !v.hasAny("apiVersion", "kind")
}

// isSection recognises the section of a plugin in the values of the NVIDIA network operator.
func isSection(v value, plugin string) bool {
	return nameOf(v) == plugin && v.at("resources").isList() && v.at("resources").items() != nil
}

func isNodePolicy(v value) bool {
	return v.at("kind").text() == "SriovNetworkNodePolicy"
}

func (s *sriovdp) read(v value) {
	if isNodePolicy(v) {
		s.policies = append(s.policies, v.at("spec"))
		return
	}
	if isSection(v, "sriovDevicePlugin") {
		s.section(v)
		return
	}
	if isOperatorValues(v) {
		is := func(o *option) bool { return o.name == "resource-prefix" }
		s.settings.put(s.settings.find(is), v.at("operator", "resourcePrefix"), inFile)
		s.im.onlyRead(v, []string{v.at("operator", "resourcePrefix").path})
		return
	}
	v = v.respell("resourceList")
	s.im.unknownExcept(v, "resourceList")
	pools := v.at("resourceList").items()
	if s.im.configMapName == operatorConfig {
		s.operator = append(s.operator, pools...)
		return
	}
	s.pools = append(s.pools, pools...)
}

// section reads pools from chart values, which have the selectors beside the name.
func (s *sriovdp) section(v value) {
	for _, r := range v.at("resources").items() {
		pool := newObject(r.node.Line, "resourceName", r.at("name").node, "resourcePrefix", newScalar("nvidia.com", r.node.Line))
		selectors := newObject(r.node.Line)
		for name, field := range r.fields() {
			if name != "name" {
				selectors.Content = append(selectors.Content, newScalar(name, r.node.Line), field.node)
			}
		}
		pool.Content = append(pool.Content, newScalar("selectors", r.node.Line), selectors)
		r.node = pool
		s.pools = append(s.pools, r)
	}
}

func (s *sriovdp) finishSettings() {
	s.settings.finishOptions()
	for _, policy := range s.policies {
		s.nodePolicy(policy)
	}
	for _, pool := range s.operator {
		prefix := ""
		if !s.ran {
			prefix = operatorDefault
		}
		s.readPool(pool, prefix)
	}
	for _, pool := range s.pools {
		s.readPool(pool, "")
	}
}

// The default prefixes of resources: the plugin's own, and the prefix that the SR-IOV network
// operator sets.
const (
	poolDefault     = "intel.com"
	operatorDefault = "openshift.io"
)

// operatorConfig is the ConfigMap with a file of the operator for each node.
const operatorConfig = "device-plugin-config"

const ofOperator = "has the prefix %s, which is the operator's default; name the DaemonSet or its values too if yours is another"

// The fields of a pool, and of a set of its selectors. The operator's files also contain fields
// that the plugin computes from selectors.
var (
	poolFields     = []string{"resourceName", "resourcePrefix", "deviceType", "excludeTopology", "additionalInfo", "selectors", "isRdma", "rootDevices", "sriovMode", "SelectorObj", "SelectorObjs"}
	selectorFields = []string{"vendors", "devices", "drivers", "pciAddresses", "acpiIndexes", "auxTypes", "pfNames", "rootDevices", "linkTypes", "pKeys", "vdpaType", "isRdma", "needVhostNet", "ddpProfiles"}
)

// spelledPool returns a pool with the spelling of the fields above: the operator writes IsRdma and
// NeedVhostNet.
func spelledPool(v value) value {
	v = v.respell(poolFields...)
	for i := 1; v.isMap() && i < len(v.node.Content); i += 2 {
		if v.node.Content[i-1].Value != "selectors" {
			continue
		}
		sets := value{node: v.node.Content[i]}
		if !sets.isList() {
			v.node.Content[i] = sets.respell(selectorFields...).node
			continue
		}
		list := *sets.node
		list.Content = nil
		for _, set := range sets.items() {
			list.Content = append(list.Content, set.respell(selectorFields...).node)
		}
		v.node.Content[i] = &list
	}
	return v
}

// readPool reads a pool of devices. operator is the default prefix of the operator, "" if the
// operator does not start the plugin or the prefix is set elsewhere.
func (s *sriovdp) readPool(v value, operator string) {
	v = spelledPool(v)
	prefix := cmp.Or(v.at("resourcePrefix").text(), s.settings.get("resource-prefix").text())
	if prefix == "" && operator != "" {
		s.im.noteRemark(v.at("resourceName"), ofOperator, operator)
	}
	prefix = cmp.Or(prefix, operator, poolDefault)
	name := prefix + "/" + v.at("resourceName").text()
	s.im.unknownExcept(v, poolFields...)
	kind := strings.ToLower(v.at("deviceType").text())
	if devices := v.at("rootDevices"); devices.isPresent() && v.has("selectors") {
		s.im.noteRemark(devices, "the plugin does not read it any more beside selectors, since release 3.0")
	}
	v = convertPool(v, kind)
	var sets []string
	whole := true
	said := s.readSettings(v)
	for _, set := range v.at("selectors").items() {
		p := &pool{im: s.im, kind: kind}
		cel, ok := p.selectorOf(set)
		sets = append(sets, cel)
		whole = whole && ok
		if slices.ContainsFunc(s.im.shared, func(shared map[string][]string) bool { return !areDisjoint(shared, p.chosen) }) {
			s.im.notePodChange(v.at("resourceName"), "an adapter that a pool of the shared RDMA plugin selects too is in that pool only, where the plugins offer it twice")
		}
	}
	if len(sets) == 0 {
		p := &pool{im: s.im, kind: kind}
		cel, ok := p.selectorOf(value{})
		sets, whole = []string{cel}, ok
	}
	if !whole {
		return // already noted
	}
	s.im.addPool(v, name, anyOf(slices.Compact(sets)), said)
}

// readSettings reads the fields of a pool beside its selectors. The plugin adds the vhost-net nodes
// only to devices of the selector sets with needVhostNet.
func (s *sriovdp) readSettings(v value) *v1alpha1.SRIOVPool {
	out := &v1alpha1.SRIOVPool{}
	out.ExcludeTopology = v.at("excludeTopology").is()
	for id, of := range v.at("additionalInfo").fields() {
		for key, field := range of.fields() {
			if out.AdditionalInfo == nil {
				out.AdditionalInfo = make(map[string]map[string]string)
			}
			if out.AdditionalInfo[id] == nil {
				out.AdditionalInfo[id] = make(map[string]string)
			}
			out.AdditionalInfo[id][key] = field.text()
		}
	}
	sets := v.at("selectors").items()
	needs := func(set value) bool { return set.at("needVhostNet").is() }
	i := slices.IndexFunc(sets, needs)
	out.NeedVhostNet = i >= 0
	if i >= 0 && slices.ContainsFunc(sets, func(set value) bool { return !needs(set) }) {
		s.im.notePodChange(sets[i].at("needVhostNet"), "all devices of the pool come with /dev/vhost-net and /dev/net/tun, also those of its other selectors")
	}
	return out
}

// drivers maps the device types of releases before 3.0.
var drivers = map[string]string{"vfio": "vfio-pci", "uio": "igb_uio"}

// convertPool converts a pool to the format since release 3.0, which selects devices below
// selectors. Before, rootDevices were the devices themselves or, with sriovMode, the physical
// functions whose virtual functions are selected.
func convertPool(v value, kind string) value {
	selectors := newObject(v.node.Line)
	if v.at("isRdma").is() {
		selectors.Content = append(selectors.Content, newScalar("isRdma", v.node.Line), newScalar("true", v.node.Line))
	}
	if driver := drivers[kind]; driver != "" {
		selectors.Content = append(selectors.Content, newScalar("drivers", v.node.Line), newScalar(driver, v.node.Line))
	}
	if devices := v.at("rootDevices"); devices.isPresent() && !v.has("selectors") {
		list := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Line: devices.node.Line}
		for _, address := range devices.texts() {
			if strings.Count(address, ":") == 1 {
				address = "0000:" + address
			}
			list.Content = append(list.Content, newScalar(address, devices.node.Line))
		}
		of := "pciAddresses"
		if v.at("sriovMode").is() {
			of = "rootDevices"
		}
		selectors.Content = append(selectors.Content, newScalar(of, v.node.Line), list)
	}
	if len(selectors.Content) == 0 {
		return v
	}
	mergeFields(selectors, v.at("selectors").node)
	pool := newObject(v.node.Line, "selectors", selectors)
	mergeFields(pool, v.node)
	v.node = pool
	return v
}

// nodePolicy reads a SriovNetworkNodePolicy, which the SR-IOV network operator converts to a pool.
func (s *sriovdp) nodePolicy(v value) {
	prefix := cmp.Or(s.settings.get("resource-prefix").text(), operatorDefault)
	p, said := &pool{im: s.im}, &v1alpha1.SRIOVPool{}
	p.cel = []string{oneOf(kindAttribute, []string{"nic"})}
	if v.at("isRdma").is() {
		p.cel = []string{oneOf(familyAttribute, []string{"rdma"})}
	}
	nic := v.at("nicSelector")
	p.addOneOf(text("pciVendor"), pciIDs(nic.at("vendor")))
	if id := nic.at("deviceID"); id.text() != "" {
		s.im.noteRemark(id, "is the ID of the physical functions, and is not used: rootDevices or pfNames select the virtual functions")
	}
	ok := p.addParts(text("pfName"), nic.at("pfNames"))
	ok = p.addParts(text("pfPCIBusID"), nic.at("rootDevices")) && ok
	s.im.unknownExcept(nic, "vendor", "deviceID", "pfNames", "rootDevices", "netFilter")
	if filter := nic.at("netFilter"); filter.text() != "" {
		s.im.notePodChange(filter, "networks of clouds are not known, so the pool is left out")
		ok = false
	}
	switch kind := v.at("deviceType"); kind.text() {
	case "vfio-pci":
		p.addOneOf(text("driver"), []string{"vfio-pci"})
	case "", "netdevice":
	default:
		s.im.notePodChange(kind, "is not known")
	}
	if vdpa := v.at("vdpaType"); vdpa.text() != "" {
		p.addOneOf(text("vdpaType"), []string{strings.TrimPrefix(vdpa.text(), "vdpa/")})
	}
	said.NeedVhostNet = v.at("needVhostNet").is()
	said.ExcludeTopology = v.at("excludeTopology").is()
	for name, label := range v.at("nodeSelector").fields() {
		if v.nodes == nil {
			v.nodes = &v1alpha1.Nodes{MatchLabels: make(map[string]string)}
		}
		v.nodes.MatchLabels[name] = label.text()
	}
	for _, name := range []string{"numVfs", "mtu", "priority", "linkType", "eSwitchMode", "externallyManaged", "bridge"} {
		if field := v.at(name); !field.isNull() {
			s.im.noteRemark(field, "is about making functions: see chandler provision, or keep the operator for it")
		}
	}
	s.im.unknownExcept(v, "nicSelector", "isRdma", "deviceType", "vdpaType", "needVhostNet", "excludeTopology", "nodeSelector", "numVfs", "mtu", "priority", "linkType", "eSwitchMode", "externallyManaged", "bridge", "resourceName")
	if ok {
		s.im.addPool(v, prefix+"/"+v.at("resourceName").text(), all(p.cel), said)
		if !s.settings.get("resource-prefix").isPresent() {
			s.im.noteRemark(v.at("resourceName"), ofOperator, prefix)
		}
	}
}
