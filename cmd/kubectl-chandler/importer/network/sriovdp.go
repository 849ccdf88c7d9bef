// Package network reads the configurations of the device plugins for network adapters: the SR-IOV network
// device plugin and the shared RDMA device plugin.
package network

import (
	"cmp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
)

// sriovdp reads configurations of the SR-IOV network device plugin (README.md and pkg/types in
// k8snetworkplumbingwg/sriov-network-device-plugin v3.9).
type sriovdp struct {
	im       *plugin.Import
	settings *plugin.Settings
	shared   *Adapters
	pools    []source.Value // of all files
	policies []source.Value // SriovNetworkNodePolicies
	operator []source.Value // the pools of the operator's ConfigMap
	ran      bool           // a container runs the plugin, and its flags set the prefix
}

// NewFormats returns the formats of the plugins for network adapters. shared is the same for all
// formats of one import.
func NewFormats(im *plugin.Import, shared *Adapters) []*plugin.Format {
	return []*plugin.Format{newSRIOV(im, shared), newRDMAShared(im, shared)}
}

func newSRIOV(im *plugin.Import, shared *Adapters) *plugin.Format {
	s := &sriovdp{im: im, shared: shared}
	s.settings = plugin.NewSettings(im, []plugin.Option{
		{Name: "resource-prefix", Fate: plugin.FateCarried},
		{Name: "config-file", Harmless: []string{"/etc/pcidp/config.json"}, Reason: "import that file too, if it is not among the files"},
		{Name: "use-cdi", NoValue: true, Harmless: []string{"false"}, Reason: "containers get the same device nodes without it"},
	})
	return &plugin.Format{
		Name:          "the SR-IOV network device plugin",
		Forms:         "config.json alone, in a ConfigMap or a NicClusterPolicy, flags, DaemonSet, Helm values, SriovNetworkNodePolicy",
		Families:      []string{"sriovnet", "rdma", "vfio"},
		Alternatives:  true,
		NeedsDocument: true,
		IsDocument:    s.is,
		ReadDocument:  s.read,
		IsContainer:   s.runsPlugin,
		ReadContainer: func(c plugin.Container) {
			s.ran = true
			s.settings.ReadFlags(c)
		},
		Finish: s.finishSettings,
	}
}

func (s *sriovdp) runsPlugin(c plugin.Container) bool {
	return c.HasName("sriov-network-device-plugin", "sriov-device-plugin", "sriovdp", "sriov-dp") || c.Image == "" && c.HasFlag("resource-prefix")
}

func (s *sriovdp) is(v source.Value) bool {
	return v.RespellFields("resourceList").Has("resourceList") || isNodePolicy(v) || isSection(v, "sriovDevicePlugin") || isOperatorValues(v)
}

// isOperatorValues recognises values of the operator's chart that set the plugin's resource prefix.
func isOperatorValues(v source.Value) bool {
	return v.At("operator", "resourcePrefix").IsText() && !v.HasAny("apiVersion", "kind")
}

// isSection recognises the section of a plugin in the values of the NVIDIA network operator.
func isSection(v source.Value, plugin string) bool {
	return v.FieldName() == plugin && v.At("resources").IsList() && v.At("resources").ListItems() != nil
}

func isNodePolicy(v source.Value) bool {
	return v.At("kind").Text() == "SriovNetworkNodePolicy"
}

func (s *sriovdp) read(v source.Value) {
	if isNodePolicy(v) {
		s.policies = append(s.policies, v.At("spec"))
		return
	}
	if isSection(v, "sriovDevicePlugin") {
		s.section(v)
		return
	}
	if isOperatorValues(v) {
		s.settings.Put(s.settings.FindFlag("resource-prefix"), v.At("operator", "resourcePrefix"), plugin.InFile)
		s.im.Notes.AddOnlyRead(v, []string{v.At("operator", "resourcePrefix").Path})
		return
	}
	v = v.RespellFields("resourceList")
	s.im.Notes.AddUnknownExcept(v, "resourceList")
	pools := v.At("resourceList").ListItems()
	if s.im.ConfigMapName == operatorConfig {
		s.operator = append(s.operator, pools...)
		return
	}
	s.pools = append(s.pools, pools...)
}

// section reads pools from chart values, which have the selectors beside the name.
func (s *sriovdp) section(v source.Value) {
	for _, r := range v.At("resources").ListItems() {
		pool := yamlnode.NewObject(r.Node.Line, "resourceName", r.At("name").Node, "resourcePrefix", yamlnode.NewScalar("nvidia.com", r.Node.Line))
		selectors := yamlnode.NewObject(r.Node.Line)
		for name, field := range r.Fields() {
			if name != "name" {
				selectors.Content = append(selectors.Content, yamlnode.NewScalar(name, r.Node.Line), field.Node)
			}
		}
		pool.Content = append(pool.Content, yamlnode.NewScalar("selectors", r.Node.Line), selectors)
		r.Node = pool
		s.pools = append(s.pools, r)
	}
}

func (s *sriovdp) finishSettings() {
	s.settings.FinishOptions()
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
func spelledPool(v source.Value) source.Value {
	v = v.RespellFields(poolFields...)
	for i := 1; v.IsMap() && i < len(v.Node.Content); i += 2 {
		if v.Node.Content[i-1].Value != "selectors" {
			continue
		}
		sets := source.Value{Node: v.Node.Content[i]}
		if !sets.IsList() {
			v.Node.Content[i] = sets.RespellFields(selectorFields...).Node
			continue
		}
		list := *sets.Node
		list.Content = nil
		for _, set := range sets.ListItems() {
			list.Content = append(list.Content, set.RespellFields(selectorFields...).Node)
		}
		v.Node.Content[i] = &list
	}
	return v
}

// readPool reads a pool of devices. operator is the default prefix of the operator, "" if the
// operator does not start the plugin or the prefix is set elsewhere.
func (s *sriovdp) readPool(v source.Value, operator string) {
	v = spelledPool(v)
	prefix := cmp.Or(v.At("resourcePrefix").Text(), s.settings.Get("resource-prefix").Text())
	if prefix == "" && operator != "" {
		s.im.Notes.AddRemark(v.At("resourceName"), ofOperator, operator)
	}
	prefix = cmp.Or(prefix, operator, poolDefault)
	name := prefix + "/" + v.At("resourceName").Text()
	s.im.Notes.AddUnknownExcept(v, poolFields...)
	kind := strings.ToLower(v.At("deviceType").Text())
	if devices := v.At("rootDevices"); devices.IsPresent() && v.Has("selectors") {
		s.im.Notes.AddRemark(devices, "the plugin does not read it any more beside selectors, since release 3.0")
	}
	v = convertPool(v, kind)
	var sets []string
	whole := true
	said := s.readSettings(v)
	for _, set := range v.At("selectors").ListItems() {
		p := &pool{im: s.im, kind: kind}
		cel, ok := p.selectorOf(set)
		sets = append(sets, cel)
		whole = whole && ok
		if s.shared.overlap(p.chosen) {
			s.im.Notes.AddPodChange(v.At("resourceName"), "an adapter that a pool of the shared RDMA plugin selects too is in that pool only, where the plugins offer it twice")
		}
	}
	if len(sets) == 0 {
		p := &pool{im: s.im, kind: kind}
		cel, ok := p.selectorOf(source.Value{})
		sets, whole = []string{cel}, ok
	}
	if !whole {
		return // already noted
	}
	s.im.Config.AddPool(v, name, expression.AnyOf(slices.Compact(sets)), said)
}

// readSettings reads the fields of a pool beside its selectors. The plugin adds the vhost-net nodes
// only to devices of the selector sets with needVhostNet.
func (s *sriovdp) readSettings(v source.Value) *v1alpha1.SRIOVPool {
	out := &v1alpha1.SRIOVPool{}
	out.ExcludeTopology = v.At("excludeTopology").IsTrue()
	for id, of := range v.At("additionalInfo").Fields() {
		for key, field := range of.Fields() {
			if out.AdditionalInfo == nil {
				out.AdditionalInfo = make(map[string]map[string]string)
			}
			if out.AdditionalInfo[id] == nil {
				out.AdditionalInfo[id] = make(map[string]string)
			}
			out.AdditionalInfo[id][key] = field.Text()
		}
	}
	sets := v.At("selectors").ListItems()
	needs := func(set source.Value) bool { return set.At("needVhostNet").IsTrue() }
	i := slices.IndexFunc(sets, needs)
	out.NeedVhostNet = i >= 0
	if i >= 0 && slices.ContainsFunc(sets, func(set source.Value) bool { return !needs(set) }) {
		s.im.Notes.AddPodChange(sets[i].At("needVhostNet"), "all devices of the pool come with /dev/vhost-net and /dev/net/tun, also those of its other selectors")
	}
	return out
}

// drivers maps the device types of releases before 3.0.
var drivers = map[string]string{"vfio": "vfio-pci", "uio": "igb_uio"}

// convertPool converts a pool to the format since release 3.0, which selects devices below
// selectors. Before, rootDevices were the devices themselves or, with sriovMode, the physical
// functions whose virtual functions are selected.
func convertPool(v source.Value, kind string) source.Value {
	selectors := yamlnode.NewObject(v.Node.Line)
	if v.At("isRdma").IsTrue() {
		selectors.Content = append(selectors.Content, yamlnode.NewScalar("isRdma", v.Node.Line), yamlnode.NewScalar("true", v.Node.Line))
	}
	if driver := drivers[kind]; driver != "" {
		selectors.Content = append(selectors.Content, yamlnode.NewScalar("drivers", v.Node.Line), yamlnode.NewScalar(driver, v.Node.Line))
	}
	if devices := v.At("rootDevices"); devices.IsPresent() && !v.Has("selectors") {
		list := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Line: devices.Node.Line}
		for _, address := range devices.ListTexts() {
			if strings.Count(address, ":") == 1 {
				address = "0000:" + address
			}
			list.Content = append(list.Content, yamlnode.NewScalar(address, devices.Node.Line))
		}
		of := "pciAddresses"
		if v.At("sriovMode").IsTrue() {
			of = "rootDevices"
		}
		selectors.Content = append(selectors.Content, yamlnode.NewScalar(of, v.Node.Line), list)
	}
	if len(selectors.Content) == 0 {
		return v
	}
	yamlnode.MergeFields(selectors, v.At("selectors").Node)
	pool := yamlnode.NewObject(v.Node.Line, "selectors", selectors)
	yamlnode.MergeFields(pool, v.Node)
	v.Node = pool
	return v
}

// nodePolicy reads a SriovNetworkNodePolicy, which the SR-IOV network operator converts to a pool.
func (s *sriovdp) nodePolicy(v source.Value) {
	prefix := cmp.Or(s.settings.Get("resource-prefix").Text(), operatorDefault)
	p, said := &pool{im: s.im}, &v1alpha1.SRIOVPool{}
	p.cel = []string{expression.OneOf(expression.Kind, []string{"nic"})}
	if v.At("isRdma").IsTrue() {
		p.cel = []string{expression.OneOf(expression.Family, []string{"rdma"})}
	}
	nic := v.At("nicSelector")
	p.addOneOf(expression.Text("pciVendor"), pciIDs(nic.At("vendor")))
	if id := nic.At("deviceID"); id.Text() != "" {
		s.im.Notes.AddRemark(id, "is the ID of the physical functions, and is not used: rootDevices or pfNames select the virtual functions")
	}
	ok := p.addParts(expression.Text("pfName"), nic.At("pfNames"))
	ok = p.addParts(expression.Text("pfPCIBusID"), nic.At("rootDevices")) && ok
	s.im.Notes.AddUnknownExcept(nic, "vendor", "deviceID", "pfNames", "rootDevices", "netFilter")
	if filter := nic.At("netFilter"); filter.Text() != "" {
		s.im.Notes.AddPodChange(filter, "networks of clouds are not known, so the pool is left out")
		ok = false
	}
	switch kind := v.At("deviceType"); kind.Text() {
	case "vfio-pci":
		p.addOneOf(expression.Text("driver"), []string{"vfio-pci"})
	case "", "netdevice":
	default:
		s.im.Notes.AddPodChange(kind, "is not known")
	}
	if vdpa := v.At("vdpaType"); vdpa.Text() != "" {
		p.addOneOf(expression.Text("vdpaType"), []string{strings.TrimPrefix(vdpa.Text(), "vdpa/")})
	}
	said.NeedVhostNet = v.At("needVhostNet").IsTrue()
	said.ExcludeTopology = v.At("excludeTopology").IsTrue()
	for name, label := range v.At("nodeSelector").Fields() {
		if v.Nodes == nil {
			v.Nodes = &v1alpha1.Nodes{MatchLabels: make(map[string]string)}
		}
		v.Nodes.MatchLabels[name] = label.Text()
	}
	for _, name := range []string{"numVfs", "mtu", "priority", "linkType", "eSwitchMode", "externallyManaged", "bridge"} {
		if field := v.At(name); !field.IsNull() {
			s.im.Notes.AddRemark(field, "is about making functions: see chandler provision, or keep the operator for it")
		}
	}
	s.im.Notes.AddUnknownExcept(v, "nicSelector", "isRdma", "deviceType", "vdpaType", "needVhostNet", "excludeTopology", "nodeSelector", "numVfs", "mtu", "priority", "linkType", "eSwitchMode", "externallyManaged", "bridge", "resourceName")
	if ok {
		s.im.Config.AddPool(v, prefix+"/"+v.At("resourceName").Text(), expression.All(p.cel), said)
		if !s.settings.Get("resource-prefix").IsPresent() {
			s.im.Notes.AddRemark(v.At("resourceName"), ofOperator, prefix)
		}
	}
}
