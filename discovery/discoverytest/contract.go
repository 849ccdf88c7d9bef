package discoverytest

import (
	"fmt"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/scan"
)

// forms contains patterns for the values of some attributes.
var forms = map[resourceapi.QualifiedName]*regexp.Regexp{
	"pciVendor": regexp.MustCompile(`^[0-9a-f]{4}$`),
	"pciDevice": regexp.MustCompile(`^[0-9a-f]{4}$`),
	"pciClass":  regexp.MustCompile(`^[0-9a-f]{6}$`),
	"function":  regexp.MustCompile(`^(physical|virtual|partition)$`),
}

// kinds lists the values of the attribute "kind". True means hardware, whose vendor must be known,
// at least by its PCI or USB ID.
var kinds = map[string]bool{
	"gpu": true, "npu": true, "fpga": true, "crypto": true, "dma": true, "nic": true,
	"virtualization": false, "enclave": false, "other": false,
}

// standard is the prefix of attributes that Kubernetes defines.
const standard = "resource.kubernetes.io/"

// checkContract checks the requirements for the snapshot of any host.
func checkContract(t testing.TB, host *discovery.Host, families []*discovery.Family, snapshot *discovery.Snapshot) {
	t.Helper()
	again := scan.ReadHost(host, families)
	if string(marshal(t, snapshot)) != string(marshal(t, again)) {
		t.Error("two scans of the same host disagree")
	}
	for _, p := range snapshot.Problems {
		if p.Device == "" || p.Err == nil || strings.Contains(p.Error(), "panic") {
			t.Errorf("problem %+v: must name a device, and be no panic", p)
		}
	}
	ids := make(map[string]string)
	for i := range snapshot.Devices {
		d := &snapshot.Devices[i]
		checkDevice(t, host, d)
		for _, offer := range d.PluginOffers {
			for _, id := range offer.IDs {
				key := offer.Resource + "=" + id
				if other, taken := ids[key]; taken && other != unitOf(d, offer) {
					t.Errorf("%s: %s is offered by %s too", d.Name, key, other)
				}
				ids[key] = unitOf(d, offer)
			}
		}
	}
	checkSilicon(t, snapshot.Devices)
	checkInterchangeable(t, snapshot)
	for _, f := range families {
		own := slices.DeleteFunc(slices.Clone(snapshot.Devices), func(d discovery.Device) bool { return d.Family != f.Name })
		checkGrant(t, f, own)
	}
}

// CheckNodes checks that different physical devices share no device nodes except common nodes.
// Otherwise a container with one of the devices could use the other. Partitions of one physical
// device that do not compete may share nodes, as MIG instances share the node of their GPU, but
// each partition needs a node that the other lacks. Nodes are compared by their numbers, regardless
// of their paths. Any number of containers may share the nodes of open devices.
func CheckNodes(t testing.TB, snapshot *discovery.Snapshot) {
	t.Helper()
	holders := make(map[string]*discovery.Device) // by node
	parts := make(map[string][]*discovery.Device) // non-competing partitions by physical device
	nodes := make(map[*discovery.Device][]string)
	for i := range snapshot.Devices {
		d := &snapshot.Devices[i]
		if d.Shareable {
			continue
		}
		nodes[d] = ownNodes(d)
		for _, node := range nodes[d] {
			if other := holders[node]; other != nil && other.Silicon() != d.Silicon() {
				t.Errorf("%s and %s: are different silicon, and both have %s", other.Name, d.Name, node)
			}
			holders[node] = d
		}
		if d.Name == d.Silicon() || len(d.Takes) > 0 || d.Health.Status == discovery.Unknown {
			continue // an unreadable device is not allocated to new consumers
		}
		for _, other := range parts[d.Silicon()] {
			if isWithin(nodes[d], nodes[other]) || isWithin(nodes[other], nodes[d]) {
				t.Errorf("%s and %s: are parts that do not compete, and one has no node that the other has not", other.Name, d.Name)
			}
		}
		parts[d.Silicon()] = append(parts[d.Silicon()], d)
	}
}

// ownNodes returns the nodes of a device that are not common, as numbers, or as paths if the
// numbers are unknown.
func ownNodes(d *discovery.Device) (nodes []string) {
	for _, node := range slices.Concat(d.Edits.DeviceNodes, d.SharedEdits.DeviceNodes) {
		switch {
		case slices.Contains(d.CommonNodes, node.HostPath):
		case node.Major == 0 && node.Minor == 0:
			nodes = append(nodes, node.HostPath)
		default:
			nodes = append(nodes, fmt.Sprintf("%s (%d:%d)", node.Type, node.Major, node.Minor))
		}
	}
	return nodes
}

// isWithin reports whether nodes is a non-empty subset of others.
func isWithin(nodes, others []string) bool {
	return len(nodes) > 0 && !slices.ContainsFunc(nodes, func(node string) bool { return !slices.Contains(others, node) })
}

// checkVendors checks that hardware has a vendor, at least as a PCI or USB ID. On a host with
// problems the vendor may be unknown.
func checkVendors(t testing.TB, snapshot *discovery.Snapshot) {
	t.Helper()
	for _, d := range snapshot.Devices {
		vendor := d.Attributes.String("vendor") + d.Attributes.String("pciVendor") + d.Attributes.String("usbVendor")
		if kinds[d.Attributes.String("kind")] && vendor == "" && len(snapshot.Problems) == 0 {
			t.Errorf("%s: no vendor", d.Name)
		}
	}
}

// checkSilicon checks that all devices of a physical device have the same counters, and take only
// these counters.
func checkSilicon(t testing.TB, devices []discovery.Device) {
	t.Helper()
	counters := make(map[string]string)
	for i := range devices {
		d := &devices[i]
		if d.PartOf == nil {
			if len(d.Takes) > 0 {
				t.Errorf("%s: takes of nothing", d.Name)
			}
			continue
		}
		for counter := range d.Takes {
			if _, found := d.PartOf.Counters[counter]; !found {
				t.Errorf("%s: takes of counter %s, which %s does not have", d.Name, counter, d.PartOf.Name)
			}
		}
		if len(d.Takes) == 0 {
			continue
		}
		has := string(marshal(t, d.PartOf.Counters))
		if other, seen := counters[d.PartOf.Name]; seen && other != has {
			t.Errorf("%s: counters of %s differ from those of its other devices", d.Name, d.PartOf.Name)
		}
		counters[d.PartOf.Name] = has
	}
}

// checkInterchangeable checks that interchangeable devices are for exclusive use without capacities,
// that they are whole physical devices, or parts of one that do not compete, and that their common
// name can be published and belongs to no device.
func checkInterchangeable(t testing.TB, snapshot *discovery.Snapshot) {
	t.Helper()
	parents := make(map[string]string) // of parts, by common name
	for i := range snapshot.Devices {
		d := &snapshot.Devices[i]
		if d.Interchangeable == "" {
			continue
		}
		if len(d.Takes) > 0 || d.Shareable || d.Creation != nil || len(d.Capacity) > 0 || d.Identity != "" {
			t.Errorf("%s: cannot be interchangeable", d.Name)
		}
		parent := ""
		if d.PartOf != nil {
			parent = d.PartOf.Name
		}
		if other, known := parents[d.Interchangeable]; known && other != parent || d.Name == parent {
			t.Errorf("%s: is interchangeable with parts of another physical device", d.Name)
		}
		parents[d.Interchangeable] = parent
		if _, taken := snapshot.Lookup(d.Interchangeable); taken || len(validation.IsDNS1123Label(d.Interchangeable)) > 0 {
			t.Errorf("%s: common name %s belongs to a device, or is no DNS label", d.Name, d.Interchangeable)
		}
	}
}

// unitOf returns the unit or device of the offer's IDs.
func unitOf(d *discovery.Device, offer discovery.Offer) string {
	if offer.Unit != "" {
		return offer.Unit
	}
	return d.Name
}

func checkDevice(t testing.TB, host *discovery.Host, d *discovery.Device) {
	t.Helper()
	if err := d.Validate(); err != nil {
		t.Errorf("%s: %v", d.Name, err)
	}
	source := d.Source
	if d.Creation != nil {
		source = d.Creation.Of
	}
	if _, err := fs.Stat(host.FS, source); err != nil {
		t.Errorf("%s: source: %v", d.Name, err)
	}
	_, known := kinds[d.Attributes.String("kind")]
	if !known {
		t.Errorf("%s: unknown kind %q", d.Name, d.Attributes.String("kind"))
	}
	for name, attribute := range d.Attributes {
		if err := checkAttribute(name, attribute); err != nil {
			t.Errorf("%s: attribute %s: %v", d.Name, name, err)
		}
	}
	for name, capacity := range d.Capacity {
		if !slices.Contains(discovery.Capacities, name) {
			t.Errorf("%s: capacity %s is not in discovery.Capacities", d.Name, name)
		}
		if capacity.Value.Sign() <= 0 {
			t.Errorf("%s: capacity %s: %s", d.Name, name, capacity.Value.String())
		}
	}
	if healthy := d.Health.Status == discovery.Healthy; healthy != (d.Health.Reason == "") {
		t.Errorf("%s: health %s with the reason %q", d.Name, d.Health.Status, d.Health.Reason)
	}
	if c := d.Health.Condition; c != "" && (d.Health.Status != discovery.Unhealthy || !slices.Contains(discovery.Conditions(), c)) {
		t.Errorf("%s: health %s with the condition %q", d.Name, d.Health.Status, c)
	}
	unnamed := func(offer discovery.Offer) bool { return offer.IsUnnamed() }
	if d.OptIn && (len(d.PluginOffers) == 0 || slices.ContainsFunc(d.PluginOffers, unnamed)) {
		t.Errorf("%s: an administrator cannot opt in: offers %+v", d.Name, d.PluginOffers)
	}
	if d.PartOf != nil && d.PartOf.Name == "" {
		t.Errorf("%s: part of something without a name", d.Name)
	}
}

// checkAttribute checks one attribute against the vocabulary. Numbers must not be negative: the
// kernel writes -1 for an unknown number.
func checkAttribute(name resourceapi.QualifiedName, a discovery.Attribute) error {
	kind, known := discovery.Vocabulary[name]
	if !known && !strings.HasPrefix(string(name), standard) {
		return fmt.Errorf("not in the vocabulary")
	}
	has := ""
	switch {
	case a.StringValue != nil && *a.StringValue != "":
		has = "string"
	case a.IntValue != nil && *a.IntValue >= 0:
		has = "int"
	case a.VersionValue != nil && *a.VersionValue != "":
		has = "version"
	case a.BoolValue != nil:
		has = "bool"
	}
	if has == "" || known && has != kind {
		return fmt.Errorf("%+v: empty, negative or not of type %s", a, kind)
	}
	if form := forms[name]; form != nil && !form.MatchString(*a.StringValue) {
		return fmt.Errorf("%q: not of the form %s", *a.StringValue, form)
	}
	return nil
}

// checkGrant checks that Grant is pure, and that neither Grant nor the devices set a variable that
// a claim may set.
func checkGrant(t testing.TB, f *discovery.Family, devices []discovery.Device) {
	t.Helper()
	checkVariables(t, f, devices)
	if f.Grant == nil {
		return
	}
	sets := [][]discovery.Device{devices, withSharing(devices)}
	for i := range devices {
		sets = append(sets, devices[i:i+1], withSharing(devices[i:i+1]))
	}
	for _, given := range sets {
		if len(given) == 0 {
			continue // Grant is never called without a device of the family
		}
		for _, grant := range sampleGrants(f, given) {
			before := string(marshal(t, given))
			first, second := marshal(t, f.Grant(given, grant)), marshal(t, f.Grant(given, grant))
			if string(first) != string(second) {
				t.Errorf("grant %+v: two answers for the same set", grant)
			}
			if string(marshal(t, given)) != before {
				t.Errorf("grant %+v: modified the devices it was given", grant)
			}
			for _, variable := range f.Grant(given, grant).Env {
				checkVariable(t, f, "grant", variable)
			}
		}
	}
}

// withSharing returns the devices with sharing by the administrator.
func withSharing(devices []discovery.Device) []discovery.Device {
	out := slices.Clone(devices)
	for i := range out {
		d := &out[i]
		d.Edits, d.SharedEdits = discovery.Join(d.Edits, d.SharedEdits), specs.ContainerEdits{}
		d.Capacity = maps.Clone(d.Capacity)
		if d.Capacity == nil {
			d.Capacity = make(discovery.Capacity)
		}
		d.Capacity.Set(discovery.Shares, 4)
	}
	return out
}

// sampleGrants returns one grant of each kind for devices of the family.
func sampleGrants(f *discovery.Family, given []discovery.Device) []discovery.Grant {
	asked := make(discovery.Parameters)
	for _, name := range f.Parameters {
		asked[name] = "50"
	}
	byNumber, byMemory := make(discovery.Consumed), make(discovery.Consumed)
	for i := range given {
		byNumber.Add(given[i].Name, map[resourceapi.QualifiedName]resource.Quantity{discovery.Shares: resource.MustParse("1")})
		byMemory.Add(given[i].Name, map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("1Gi")})
	}
	return []discovery.Grant{
		{API: discovery.ModeDRA, Claim: "claim", Request: "request"},
		{API: discovery.ModeDRA, Claim: "claim", Request: "request", Consumed: byMemory, Parameters: asked},
		{API: discovery.ModeDevicePlugin, Resource: "example.com/device"},
		{API: discovery.ModeDevicePlugin, Resource: "example.com/device", Consumed: byNumber},
	}
}

// checkVariables checks that devices do not set variables that claims may set.
func checkVariables(t testing.TB, f *discovery.Family, devices []discovery.Device) {
	t.Helper()
	for i := range devices {
		for _, variable := range slices.Concat(devices[i].Edits.Env, devices[i].SharedEdits.Env) {
			checkVariable(t, f, devices[i].Name, variable)
		}
	}
}

func checkVariable(t testing.TB, f *discovery.Family, who, variable string) {
	t.Helper()
	if name, _, _ := strings.Cut(variable, "="); slices.Contains(f.Variables, name) {
		t.Errorf("%s: sets %s, which a claim may set", who, variable)
	}
}
