package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/utils/ptr"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/ledger/allocation"
)

// interfaceName is a parameter of a family.
const interfaceName discovery.Parameter = "interfaceName"

// specOf returns the edits of the claim's CDI devices as a container runtime reads them.
func (b *bench) specOf(c *resourceapi.ResourceClaim) map[string]specs.ContainerEdits {
	b.t.Helper()
	cache, err := cdiapi.NewCache(cdiapi.WithSpecDirs(b.config.CDI.Path), cdiapi.WithAutoRefresh(false))
	if err != nil {
		b.t.Fatal(err)
	}
	if errs := cache.GetErrors(); len(errs) > 0 {
		b.t.Fatal(errs)
	}
	edits := make(map[string]specs.ContainerEdits)
	for _, name := range cache.ListDevices() {
		if strings.HasPrefix(name, "chandler.dev/claim="+string(c.UID)) {
			edits[name] = cache.GetDevice(name).ContainerEdits
		}
	}
	return edits
}

func (b *bench) recordFile(c *resourceapi.ResourceClaim) string {
	return filepath.Join(b.records(), string(c.UID)+".record")
}

func (b *bench) specFile(c *resourceapi.ResourceClaim) string {
	return filepath.Join(b.config.CDI.Path, "chandler.dev-claim_"+string(c.UID)+".json")
}

func exists(file string) bool {
	_, err := os.Lstat(file)
	return err == nil
}

func mustPrepare(t *testing.T, b *bench, c *resourceapi.ResourceClaim) []kubeletplugin.Device {
	t.Helper()
	devices, err := b.try(c)
	if err != nil {
		t.Fatalf("prepare %s: %v", c.Name, err)
	}
	return devices
}

func mustUnprepare(t *testing.T, b *bench, c *resourceapi.ResourceClaim) {
	t.Helper()
	if err := b.tryUnprepare(c); err != nil {
		t.Fatalf("unprepare %s: %v", c.Name, err)
	}
}

func mustRefuse(t *testing.T, b *bench, c *resourceapi.ResourceClaim, words ...string) {
	t.Helper()
	_, err := b.try(c)
	if err == nil {
		t.Fatalf("claim %s is prepared", c.Name)
	}
	for _, word := range append(words, "default/"+c.Name) {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error lacks %q: %v", word, err)
		}
	}
}

func TestAnswer(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1), gpu("b", 2), rules.Offered{Device: discovery.Device{Name: "kvm", Shareable: true}})
	c := claim("c", "x", "b", "a", "kvm")
	results := c.Status.Allocation.Devices.Results
	results[0].Driver = "other.example.com"
	results[3].Request = "vm/fast"
	results[3].ShareID = ptr.To(types.UID("11111111-2222-3333-4444-555555555555"))
	want := []kubeletplugin.Device{
		{Requests: []string{"r"}, PoolName: "node", DeviceName: "b", CDIDeviceIDs: []string{"chandler.dev/claim=uid-c-1-b"}},
		{Requests: []string{"r"}, PoolName: "node", DeviceName: "a", CDIDeviceIDs: []string{"chandler.dev/claim=uid-c-2-a"}},
		{Requests: []string{"vm/fast"}, PoolName: "node", DeviceName: "kvm", ShareID: results[3].ShareID,
			CDIDeviceIDs: []string{"chandler.dev/claim=uid-c-3-kvm-11111111-2222-3333-4444-555555555555"}},
	}
	for _, when := range []string{"first", "again", "after a restart"} {
		if when == "after a restart" {
			b.restart().offers(gpu("a", 1), gpu("b", 2), rules.Offered{Device: discovery.Device{Name: "kvm", Shareable: true}})
		}
		if diff := cmp.Diff(want, mustPrepare(t, b, c), cmpopts.IgnoreFields(kubeletplugin.Device{}, "Metadata")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	spec := b.specOf(c)
	for _, device := range want {
		if _, found := spec[device.CDIDeviceIDs[0]]; !found {
			t.Errorf("%s is not in the spec", device.CDIDeviceIDs[0])
		}
	}
	if got := mustPrepare(t, b, claim("none")); len(got) != 0 || exists(b.recordFile(claim("none"))) {
		t.Error("a claim without devices of ours has a record")
	}
}

func TestEnvironment(t *testing.T) {
	b := newBench(t)
	b.config.Granter = func(given []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
		var names []string
		for _, d := range given {
			names = append(names, d.Identity)
		}
		return specs.ContainerEdits{
			Env:    []string{"VISIBLE=" + strings.Join(names, ","), fmt.Sprintf("GRANT={%s %s %s %s}", grant.API, grant.Resource, grant.Claim, grant.Request)},
			Mounts: []*specs.Mount{{HostPath: "/opt", ContainerPath: "/opt"}},
		}
	}
	named := gpu("c", 3)
	named.Offers = []discovery.Offer{{Resource: "amd.com/gpu"}}
	b.restart().offers(gpu("a", 1), gpu("b", 2), named)
	c := claim("made-up-xyz12", "b", "a", "c")
	c.Annotations = map[string]string{"resource.kubernetes.io/pod-claim-name": "my-gpus"}
	c.Status.Allocation.Devices.Results[2].Request = "two/sub-1"
	mustPrepare(t, b, c)
	spec := b.specOf(c)
	for id, want := range map[string][]string{
		"chandler.dev/claim=uid-made-up-xyz12-0-b": {"VISIBLE=uuid-of-b,uuid-of-a", "GRANT={DRA  my-gpus r}", "CHANDLER_DEVICES=b,a"},
		"chandler.dev/claim=uid-made-up-xyz12-1-a": {"VISIBLE=uuid-of-b,uuid-of-a", "GRANT={DRA  my-gpus r}", "CHANDLER_DEVICES=b,a"},
		"chandler.dev/claim=uid-made-up-xyz12-2-c": {"VISIBLE=uuid-of-c", "GRANT={DRA amd.com/gpu my-gpus two/sub-1}", "CHANDLER_DEVICES=c"},
	} {
		suffix := "_MY_GPUS_R="
		if strings.HasSuffix(id, "c") {
			suffix = "_MY_GPUS_TWO_SUB_1="
		}
		for _, env := range slices.Clone(want) {
			want = append(want, strings.Replace(env, "=", suffix, 1))
		}
		if diff := cmp.Diff(want, spec[id].Env); diff != "" {
			t.Errorf("%s (-want +got):\n%s", id, diff)
		}
		if len(spec[id].Mounts) != 1 {
			t.Errorf("%s: mounts %v", id, spec[id].Mounts)
		}
	}
}

func TestEachClaimFailsByItself(t *testing.T) {
	b := newBench(t)
	b.config.Granter = func(given []discovery.Device, _ discovery.Grant) specs.ContainerEdits {
		if given[0].Name == "b" {
			panic("a defect")
		}
		return specs.ContainerEdits{}
	}
	b.restart().offers(gpu("a", 1), gpu("b", 2), gpu("c", 3))
	batch := []*resourceapi.ResourceClaim{claim("gone", "nowhere"), claim("good", "a"), claim("panics", "b"), claim("good2", "c")}
	foreign := claim("foreign", "a")
	foreign.Status.Allocation.Devices.Results[0].Pool = "other-node"
	batch = append(batch, foreign)
	results, err := b.PrepareResourceClaims(t.Context(), batch)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"gone": "prepare claim default/gone: request r: device node/nowhere is gone", "good": "", "good2": "", "panics": "panic: a defect", "foreign": "other-node/a"} {
		got := ""
		if err := results[types.UID("uid-"+name)].Err; err != nil {
			got = err.Error()
		}
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

func TestHeldByClaims(t *testing.T) {
	admin := func(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
		c.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
		return c
	}
	whole := rules.Offered{Device: discovery.Device{Name: "g2"}}
	partOfWhole := rules.Offered{Device: discovery.Device{Name: "g2-vf", PartOf: &discovery.Silicon{Name: "g2"}}}
	otherPart := rules.Offered{Device: discovery.Device{Name: "g2-vf2", PartOf: &discovery.Silicon{Name: "g2"}}}
	devices := []rules.Offered{
		gpu("a", 1), pooltest.PartDevice("g1", "g1-a", 7), pooltest.PartDevice("g1", "g1-b", 3), pooltest.PartDevice("g1", "g1-c", 3), pooltest.PartDevice("g1", "g1-d", 3),
		whole, partOfWhole, otherPart, {Device: discovery.Device{Name: "kvm", Shareable: true}},
	}
	tests := map[string]struct {
		held    []*resourceapi.ResourceClaim
		wanted  *resourceapi.ResourceClaim
		refused bool
	}{
		"free":                            {[]*resourceapi.ResourceClaim{claim("h", "g1-a")}, claim("w", "a"), false},
		"same device":                     {[]*resourceapi.ResourceClaim{claim("h", "a")}, claim("w", "a"), true},
		"one of two":                      {[]*resourceapi.ResourceClaim{claim("h", "a")}, claim("w", "g1-a", "a"), true},
		"shared":                          {[]*resourceapi.ResourceClaim{claim("h", "kvm")}, claim("w", "kvm"), false},
		"for administration":              {[]*resourceapi.ResourceClaim{claim("h", "a")}, admin(claim("w", "a")), false},
		"by administration":               {[]*resourceapi.ResourceClaim{admin(claim("h", "a"))}, claim("w", "a"), false},
		"whole while a part is held":      {[]*resourceapi.ResourceClaim{claim("h", "g1-b")}, claim("w", "g1-a"), true},
		"part while the whole is":         {[]*resourceapi.ResourceClaim{claim("h", "g1-a")}, claim("w", "g1-b"), true},
		"part while another is":           {[]*resourceapi.ResourceClaim{claim("h", "g1-b")}, claim("w", "g1-c"), false},
		"third part of two":               {[]*resourceapi.ResourceClaim{claim("h", "g1-b"), claim("h2", "g1-c")}, claim("w", "g1-d"), true},
		"two parts of one claim":          {[]*resourceapi.ResourceClaim{claim("h", "g1-b")}, claim("w", "g1-c", "g1-d"), true},
		"administration of a third":       {[]*resourceapi.ResourceClaim{claim("h", "g1-b"), claim("h2", "g1-c")}, admin(claim("w", "g1-d")), false},
		"beside administration of a part": {[]*resourceapi.ResourceClaim{admin(claim("h", "g1-a"))}, claim("w", "g1-b"), false},
		"with administration of a part":   {nil, admin(claim("w", "g1-a", "g1-b")), false},
		"uncounted whole":                 {[]*resourceapi.ResourceClaim{claim("h", "g2-vf")}, claim("w", "g2"), true},
		"part of uncounted whole":         {[]*resourceapi.ResourceClaim{claim("h", "g2")}, claim("w", "g2-vf"), true},
		"uncounted parts":                 {[]*resourceapi.ResourceClaim{claim("h", "g2-vf")}, claim("w", "g2-vf2"), false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			slices.SortFunc(devices, func(a, b rules.Offered) int { return strings.Compare(a.Name, b.Name) })
			b := newBench(t).restart().offers(devices...)
			for _, c := range test.held {
				mustPrepare(t, b, c)
			}
			b.restart().offers(devices...) // allocations are read from disk
			if !test.refused {
				mustPrepare(t, b, test.wanted)
				return
			}
			mustRefuse(t, b, test.wanted, "is in use by claim default/h")
			if exists(b.recordFile(test.wanted)) || exists(b.specFile(test.wanted)) {
				t.Error("a refused claim has left something")
			}
			for _, c := range test.held {
				if err := b.tryUnprepare(c); err != nil {
					t.Fatal(err)
				}
			}
			if name != "two parts of one claim" {
				mustPrepare(t, b, test.wanted)
			}
		})
	}
}

func TestHeldByTheClassicAPI(t *testing.T) {
	b := newBench(t)
	b.restart().offers(gpu("a", 1), rules.Offered{Device: discovery.Device{Name: "kvm", Shareable: true}})
	training := &allocation.Grant{Resource: "example.com/gpu", ID: "a", Devices: []string{"a"}, Silicon: []string{"a"}, Exclusive: true, Container: "default/training main"}
	if err := b.config.Ledger.Grants.AllocateIDs(b.view.Load(), []*allocation.Grant{training}); err != nil {
		t.Fatal(err)
	}
	c := claim("c", "a")
	mustRefuse(t, b, c, "device a is in use by default/training main")
	if who, held := b.OwnerOf("a"); held || exists(b.recordFile(c)) {
		t.Errorf("in use by %s although refused", who)
	}
	c.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	mustPrepare(t, b, c)
	if who, held := b.OwnerOf("a"); held {
		t.Errorf("in use by %s although only administered", who)
	}
	mustPrepare(t, b, claim("k", "kvm"))
}

func TestVerify(t *testing.T) {
	tests := map[string]struct {
		change  func(b *bench, d *rules.Offered)
		refused string // "" if the claim is prepared
	}{
		"as it was":             {func(*bench, *rules.Offered) {}, ""},
		"swapped":               {func(_ *bench, d *rules.Offered) { d.Identity = "uuid-of-another" }, "swapped: it is uuid-of-another now and was uuid-of-a"},
		"identity is not known": {func(_ *bench, d *rules.Offered) { d.Identity = "" }, ""},
		"driver changed":        {func(_ *bench, d *rules.Offered) { d.Attributes.SetString("driver", "vfio-pci") }, `"vfio-pci" is bound`},
		"driver unbound":        {func(_ *bench, d *rules.Offered) { delete(d.Attributes, "driver") }, `"" is bound`},
		"node is missing":       {func(b *bench, _ *rules.Offered) { delete(b.host, "dev/a") }, "device node /dev/a is missing"},
		"node has other numbers": {func(b *bench, _ *rules.Offered) { b.host["dev/a"] = charDevice(226, 9) },
			"device node /dev/a is 226:9 on the host, want 226:1"},
		"node is a file":         {func(b *bench, _ *rules.Offered) { b.host["dev/a"] = &fstest.MapFile{} }, "type"},
		"node is a block device": {func(b *bench, _ *rules.Offered) { b.host["dev/a"] = &fstest.MapFile{Mode: fs.ModeDevice} }, "type"},
	}
	for name, test := range tests {
		for _, boot := range []string{"boot-1", "boot-2"} {
			t.Run(name+", "+boot, func(t *testing.T) {
				b := newBench(t).restart().offers(gpu("a", 1))
				c := claim("c", "a")
				mustPrepare(t, b, c)
				d := gpu("a", 1)
				test.change(b, &d)
				b.boot = boot
				b.restart()
				b.Publish(&rules.Snapshot{Devices: []rules.Offered{d}}, nil)
				if test.refused != "" {
					mustRefuse(t, b, c, test.refused)
				} else {
					mustPrepare(t, b, c)
				}
			})
		}
	}
}

func TestVerifyRealNode(t *testing.T) {
	root := t.TempDir()
	if err := unix.Mknod(filepath.Join(root, "a"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil {
		t.Skipf("device nodes cannot be made here: %v", err)
	}
	host := os.DirFS(root)
	found, err := nodeOnHost(host, &specs.DeviceNode{Path: "/a", Type: "c", Major: 1, Minor: 3})
	if want := (allocation.Node{Path: "/a", Type: "c", Major: 1, Minor: 3}); err != nil || found != want {
		t.Errorf("found %v, %v", found, err)
	}
	if _, err := nodeOnHost(host, &specs.DeviceNode{Path: "/a", Type: "c", Major: 1, Minor: 5}); err == nil {
		t.Error("wrong numbers pass")
	}
	if _, err := nodeOnHost(host, &specs.DeviceNode{Path: "/b", HostPath: "/a"}); err != nil {
		t.Error(err)
	}
}

func TestNodesThatChangedAreRecordedAgain(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1))
	c := claim("c", "a")
	mustPrepare(t, b, c)
	b.host["dev/a"] = charDevice(226, 5) // the driver was loaded again
	b.offers(gpu("a", 5))
	mustPrepare(t, b, c)
	if minor := b.specOf(c)["chandler.dev/claim=uid-c-0-a"].DeviceNodes[0].Minor; minor != 5 {
		t.Errorf("the spec has minor %d", minor)
	}
}

// Pods that share a claim may have started before and after its device nodes changed. The claim has
// both nodes until Unprepare.
func TestNodesOfBeforeAreKept(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1), gpu("b", 2))
	c := claim("c", "a")
	mustPrepare(t, b, c)
	swapped := []rules.Offered{gpu("a", 1), gpu("b", 2)}
	swapped[0].Edits, swapped[1].Edits = swapped[1].Edits, swapped[0].Edits
	b.offers(swapped...)
	for range 2 {
		mustPrepare(t, b, c)
		mustRefuse(t, b, claim("other", "b"), "is in use by claim default/c, which was given its nodes as those of device a")
		results := b.ledger.Claims()[0].Results
		if err := replacedBy(&results[0], &swapped[0].Device, b.view.Load()); err != nil {
			t.Errorf("it has other nodes than it was given last: %v", err)
		}
		b.restart().offers(swapped...)
	}
	mustUnprepare(t, b, c)
	mustPrepare(t, b, claim("other", "b"))
}

func TestParameters(t *testing.T) {
	b := newBench(t)
	b.config.ReadParameters = func(raw []byte) (discovery.Parameters, error) {
		name, ok := strings.CutPrefix(string(raw), "good")
		if !ok {
			return nil, fmt.Errorf("unknown kind %s", raw)
		}
		return discovery.Parameters{interfaceName: name}, nil
	}
	b.config.AcceptParameters = func(_ []discovery.Device, parameters discovery.Parameters) error {
		if parameters[interfaceName] == "-unheard-of" {
			return errors.New("takes no such name")
		}
		return nil
	}
	b.restart().offers(gpu("a", 1))
	config := func(driver, raw string, requests ...string) *resourceapi.ResourceClaim {
		c := claim("c", "a")
		c.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
			Source: resourceapi.AllocationConfigSourceClaim, Requests: requests,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(raw)}}},
		}}
		return c
	}
	mustRefuse(t, b, config("chandler.dev", "bad"), "request r", "unknown kind bad")
	mustRefuse(t, b, config("chandler.dev", "bad", "r"), "request r", "unknown kind bad")
	mustRefuse(t, b, config("chandler.dev", "good-unheard-of", "r"), "request r", "takes no such name")
	if exists(b.recordFile(claim("c"))) {
		t.Error("a refused claim has a record")
	}
	mustPrepare(t, b, config("chandler.dev", "bad", "another"))
	mustPrepare(t, b, config("other.example.com", "bad"))
	mustPrepare(t, b, config("chandler.dev", "good"))
}

// A claim's parameters override those of its device class, and reach the family.
func TestParametersReachTheFamily(t *testing.T) {
	b := newBench(t)
	b.config.ReadParameters = func(raw []byte) (discovery.Parameters, error) {
		return discovery.Parameters{interfaceName: string(raw)}, nil
	}
	b.config.Granter = func(_ []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
		return specs.ContainerEdits{Env: []string{"NAME=" + grant.Parameters[interfaceName]}}
	}
	b.restart().offers(gpu("a", 1))
	c := claim("c", "a")
	for _, said := range []struct {
		source resourceapi.AllocationConfigSource
		raw    string
	}{{resourceapi.AllocationConfigSourceClass, "class"}, {resourceapi.AllocationConfigSourceClaim, "claim"}} {
		c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
			Source: said.source,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: "chandler.dev", Parameters: runtime.RawExtension{Raw: []byte(said.raw)}}},
		})
	}
	mustPrepare(t, b, c)
	if env := b.specOf(c)["chandler.dev/claim=uid-c-0-a"].Env; !slices.Contains(env, "NAME=claim") {
		t.Errorf("the container gets %q", env)
	}
}

// Environment variables of a claim override variables of the same name in the device class, and
// leave the others. The variables are repeated under names specific to the request.
func TestEnvironmentOfClass(t *testing.T) {
	b := newBench(t)
	b.config.ReadParameters = func(raw []byte) (discovery.Parameters, error) {
		var said map[string]string
		err := json.Unmarshal(raw, &said)
		parameters := make(discovery.Parameters)
		for name, value := range said {
			parameters[discovery.EnvironmentParameter(name)] = value
		}
		return parameters, err
	}
	b.restart().offers(gpu("a", 1), gpu("b", 2))
	c := claim("c", "a", "b")
	c.Status.Allocation.Devices.Results[1].Request = "other"
	for _, said := range []struct {
		source resourceapi.AllocationConfigSource
		raw    string
	}{
		{resourceapi.AllocationConfigSourceClass, `{"QUEUES": "1", "XNACK": "0"}`},
		{resourceapi.AllocationConfigSourceClaim, `{"XNACK": "1", "DMA": "0"}`},
	} {
		c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
			Source: said.source, Requests: []string{"r"},
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: "chandler.dev", Parameters: runtime.RawExtension{Raw: []byte(said.raw)}}},
		})
	}
	mustPrepare(t, b, c)
	spec := b.specOf(c)
	want := []string{
		"DMA=0", "QUEUES=1", "XNACK=1", "CHANDLER_DEVICES=a",
		"DMA_C_R=0", "QUEUES_C_R=1", "XNACK_C_R=1", "CHANDLER_DEVICES_C_R=a",
	}
	if diff := cmp.Diff(want, spec["chandler.dev/claim=uid-c-0-a"].Env); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	want = []string{"CHANDLER_DEVICES=b", "CHANDLER_DEVICES_C_OTHER=b"}
	if diff := cmp.Diff(want, spec["chandler.dev/claim=uid-c-1-b"].Env); diff != "" {
		t.Errorf("the other request (-want +got):\n%s", diff)
	}
}

func TestSpecIsWrittenAgain(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1))
	c := claim("c", "a")
	mustPrepare(t, b, c)
	want, err := os.ReadFile(b.specFile(c))
	if err != nil {
		t.Fatal(err)
	}
	damages := map[string]func() error{
		"deleted": func() error { return os.Remove(b.specFile(c)) },
		"damaged": func() error { return os.WriteFile(b.specFile(c), []byte("{}"), 0o600) },
	}
	repairs := map[string]func(){
		"by Prepare": func() { mustPrepare(t, b, c) },
		"at start":   func() { b.restart() },
	}
	for damage, do := range damages {
		for repair, undo := range repairs {
			if err := do(); err != nil {
				t.Fatal(err)
			}
			undo()
			got, _ := os.ReadFile(b.specFile(c))
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("%s, repaired %s: %s", damage, repair, diff)
			}
			b.offers(gpu("a", 1))
		}
	}
}

// A CDI spec without a record belongs to a claim whose record was lost and whose containers may
// run. It is removed with the claim or after a reboot.
func TestSpecsWithoutRecord(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1))
	c := claim("c", "a")
	mustPrepare(t, b, c)
	if err := os.RemoveAll(b.state); err != nil {
		t.Fatal(err)
	}
	b.restart().offers(gpu("a", 1))
	if !exists(b.specFile(c)) {
		t.Error("the spec of a running container is gone")
	}
	mustRefuse(t, b, claim("other", "a"), "in use by claim with UID uid-c")
	mustUnprepare(t, b, c)
	if exists(b.specFile(c)) {
		t.Error("the spec is still there")
	}
	mustPrepare(t, b, claim("other", "a"))
	if err := os.Remove(b.recordFile(claim("other"))); err != nil {
		t.Fatal(err)
	}
	b.boot = "boot-2"
	b.restart()
	if exists(b.specFile(claim("other"))) {
		t.Error("a spec of the boot before is still there")
	}
}

func TestNewBoot(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1))
	c := claim("c", "a")
	mustPrepare(t, b, c)
	b.boot = "boot-2"
	b.restart().offers(gpu("a", 1))
	if who, held := b.OwnerOf("a"); held {
		t.Errorf("%s holds it after a reboot", who)
	}
	other := claim("other", "a")
	mustPrepare(t, b, other)
	mustRefuse(t, b, c, "in use by claim default/other")
	if r, _ := b.ledger.Claim(c.UID); r == nil || r.Results[0].Identity != "uuid-of-a" {
		t.Error("the identity is forgotten")
	}
	if err := b.tryUnprepare(other); err != nil {
		t.Fatal(err)
	}
	mustPrepare(t, b, c)
	if who, held := b.OwnerOf("a"); !held || who != "claim default/c" {
		t.Errorf("holder is %q, %v", who, held)
	}
}

func TestUnprepare(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1))
	c := claim("c", "a")
	mustPrepare(t, b, c)
	var removed []string
	b.disk.Before = func(op disktest.Op, name string) error {
		if op == disktest.Remove {
			removed = append(removed, name)
		}
		return nil
	}
	b.config.HostFS = fstest.MapFS{} // Unprepare needs neither the host nor a snapshot
	b.restart()
	for _, which := range []*resourceapi.ResourceClaim{c, c, claim("never-prepared", "a")} {
		if err := b.tryUnprepare(which); err != nil {
			t.Errorf("unprepare %s: %v", which.Name, err)
		}
	}
	if diff := cmp.Diff([]string{b.specFile(c), b.recordFile(c)}, removed); diff != "" {
		t.Errorf("removed in another order (-want +got):\n%s", diff)
	}
	if who, held := b.OwnerOf("a"); held {
		t.Errorf("still held by %s", who)
	}
}

func TestUnprepareThatFailsKeepsHolding(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // a claim waits while another releases the device
		b := newBench(t).restart().offers(gpu("a", 1))
		c := claim("c", "a")
		mustPrepare(t, b, c)
		failing := true
		b.disk.Before = func(op disktest.Op, name string) error {
			if failing && op == disktest.Remove && name == b.recordFile(c) {
				return errors.New("read-only file system")
			}
			return nil
		}
		b.restart().offers(gpu("a", 1))
		if err := b.tryUnprepare(c); err == nil || !strings.Contains(err.Error(), "read-only file system") {
			t.Errorf("error is %v", err)
		}
		mustRefuse(t, b, claim("other", "a"), "in use by claim default/c")
		failing = false
		if err := b.tryUnprepare(c); err != nil {
			t.Fatal(err)
		}
		mustPrepare(t, b, claim("other", "a"))
	})
}

func TestSpecsThatCannotBeWritten(t *testing.T) {
	blocked := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(blocked, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	b := newBench(t)
	good := b.config.CDI.Path
	b.config.CDI.Path = filepath.Join(blocked, "cdi")
	b.restart().offers(gpu("a", 1))
	c := claim("c", "a")
	mustRefuse(t, b, c, "write CDI spec "+b.specFile(c))
	if who, held := b.OwnerOf("a"); !held || !exists(b.recordFile(c)) {
		t.Errorf("in use by %s, record %t", who, exists(b.recordFile(c)))
	}
	b.config.CDI.Path = good
	b.restart().offers(gpu("a", 1)) // writes the spec
	mustPrepare(t, b, c)
}

func TestOneOfManyWins(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1), gpu("b", 2), pooltest.PartDevice("g", "g-a", 3), pooltest.PartDevice("g", "g-b", 3), pooltest.PartDevice("g", "g-c", 3))
	const n = 40
	var wins sync.Map
	var group sync.WaitGroup
	for i := range n {
		device := []string{"a", "b", "g-a", "g-b", "g-c"}[i%5]
		group.Go(func() {
			c := claim(fmt.Sprintf("c%d", i), device)
			results, err := b.PrepareResourceClaims(context.Background(), []*resourceapi.ResourceClaim{c})
			if err == nil && results[c.UID].Err == nil {
				if other, taken := wins.LoadOrStore(device, c.Name); taken {
					t.Errorf("device %s was given to %s and %s", device, other, c.Name)
				}
			}
		})
	}
	group.Wait()
	count := map[bool]int{}
	wins.Range(func(device, _ any) bool {
		count[strings.HasPrefix(device.(string), "g-")]++
		return true
	})
	if count[false] != 2 || count[true] != 2 {
		t.Errorf("devices given: %d of 2, parts: %d of 2 that fit", count[false], count[true])
	}
	files, _ := os.ReadDir(b.records())
	if len(files) != 4 {
		t.Errorf("%d records", len(files))
	}
}

func TestPrepareAndUnprepareOfOneClaimTakeTurns(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1))
	c := claim("c", "a")
	var group sync.WaitGroup
	for i := range 30 {
		group.Go(func() {
			var err error
			if i%2 == 0 {
				_, err = b.PrepareResourceClaims(context.Background(), []*resourceapi.ResourceClaim{c})
			} else {
				_, err = b.UnprepareResourceClaims(context.Background(), []kubeletplugin.NamespacedObject{{UID: c.UID}})
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	_, held := b.OwnerOf("a")
	if record, spec := exists(b.recordFile(c)), exists(b.specFile(c)); held != record || record != spec {
		t.Errorf("held %v, record %v, spec %v", held, record, spec)
	}
}

// The claims of a call are prepared concurrently.
func TestBatchesInParallel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 8
		b := newBench(t)
		var entered atomic.Int32
		all := make(chan struct{})
		b.config.Configure = func(d discovery.Device, _ discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
			if entered.Add(1) == n {
				close(all)
			}
			select {
			case <-all:
			case <-time.After(time.Minute):
				t.Errorf("device %s: the others have not begun", d.Name)
			}
			return d, nil, nil
		}
		var devices []rules.Offered
		var batch []*resourceapi.ResourceClaim
		for i := range n {
			devices = append(devices, gpu(fmt.Sprint("gpu-", i), int64(i)))
			batch = append(batch, claim(fmt.Sprint("c", i), devices[i].Name))
		}
		b.restart().offers(devices...)
		results, err := b.PrepareResourceClaims(t.Context(), batch)
		if err != nil {
			t.Fatal(err)
		}
		for uid, result := range results {
			if result.Err != nil {
				t.Errorf("claim %s: %v", uid, result.Err)
			}
		}
	})
}

func TestUnrelatedClaimsDoNotWait(t *testing.T) {
	b := newBench(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	slow := claim("slow", "a")
	b.disk.Before = func(op disktest.Op, name string) error {
		if op == disktest.Write && strings.Contains(name, "uid-slow.record") {
			close(entered)
			<-leave
		}
		return nil
	}
	b.restart().offers(gpu("a", 1), gpu("b", 2))
	ended := make(chan error, 1)
	go func() {
		_, err := b.try(slow)
		ended <- err
	}()
	<-entered
	mustPrepare(t, b, claim("quick", "b"))
	mustRefuse(t, b, claim("rival", "a"), "in use by claim default/slow")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	results, err := b.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{slow})
	if err != nil || !errors.Is(results[slow.UID].Err, context.DeadlineExceeded) {
		t.Errorf("a second call for the claim does not end with its context: %v, %v", err, results)
	}
	close(leave)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// asking returns a claim with parameters for all of its devices.
func asking(c *resourceapi.ResourceClaim, raw string) *resourceapi.ResourceClaim {
	c.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
		Source: resourceapi.AllocationConfigSourceClaim,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: "chandler.dev", Parameters: runtime.RawExtension{Raw: []byte(raw)}}},
	}}
	return c
}

// The parameters of a prepared claim are not checked again, since an interface that was moved to a
// pod is no longer available.
func TestParametersOfWhatIsPreparedAreNotJudgedAgain(t *testing.T) {
	b := newBench(t)
	b.config.ReadParameters = func(raw []byte) (discovery.Parameters, error) {
		return discovery.Parameters{interfaceName: string(raw)}, nil
	}
	moved := false
	b.config.AcceptParameters = func([]discovery.Device, discovery.Parameters) error {
		if moved {
			return errors.New("its interface is in a pod")
		}
		return nil
	}
	b.restart().offers(gpu("a", 1))
	c := asking(claim("c", "a"), "net1")
	mustPrepare(t, b, c)
	moved = true
	mustPrepare(t, b, c)
	mustUnprepare(t, b, c)
	mustRefuse(t, b, c, "its interface is in a pod")
}

func TestAdminAccessChangesNothing(t *testing.T) {
	b := newBench(t)
	b.config.ReadParameters = func(raw []byte) (discovery.Parameters, error) {
		return discovery.Parameters{interfaceName: string(raw)}, nil
	}
	b.restart().offers(gpu("a", 1))
	c := claim("c", "a")
	c.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	mustPrepare(t, b, c)
	mustUnprepare(t, b, c)
	mustRefuse(t, b, asking(c, "net1"), "device a is not the claim's alone")
}

// The slices may depend on a claim if its device is gone, or without counters, when allocated
// devices have precedence.
func TestOfferedFor(t *testing.T) {
	for name, test := range map[string]struct {
		offered []rules.Offered // when the claim is unprepared
		server  func(*resourceapi.ResourceSlice) error
		want    bool
	}{
		"still there":      {offered: []rules.Offered{gpu("a", 1)}},
		"gone":             {want: true},
		"without counters": {offered: []rules.Offered{gpu("a", 1)}, server: pooltest.WithoutCounters, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			if test.server != nil {
				b.config.KubeClient = pooltest.ChangingServer(t, test.server)
			}
			b.restart().offers(gpu("a", 1))
			if err := b.Publisher.DetectFeatures(t.Context()); err != nil {
				t.Fatal(err)
			}
			c := claim("c", "a")
			mustPrepare(t, b, c)
			b.offers(test.offered...)
			prepared, _ := b.ledger.Claim(c.UID)
			if got := b.claims.offeredFor(prepared); got != test.want {
				t.Errorf("the slices may depend on the claim: %v, want %v", got, test.want)
			}
		})
	}
}

// A container gets all devices of a request. A hook of several of these devices is called once.
func TestHooksOnceForEachRequest(t *testing.T) {
	hook := func(name string) *specs.Hook {
		return &specs.Hook{HookName: "createContainer", Path: "/bin/hook", Args: []string{name}}
	}
	result := func(request string, hooks ...*specs.Hook) allocation.Result {
		return allocation.Result{Request: request, Edits: specs.ContainerEdits{Hooks: hooks}}
	}
	shared := []*specs.Hook{hook("links"), hook("cache")}
	results := []allocation.Result{
		result("gpus", shared...), result("gpus", hook("links"), hook("other"), hook("cache")), result("one", shared...), result("none"),
	}
	hookOnce(results)
	var got []string
	for _, r := range results {
		for _, h := range r.Edits.Hooks {
			got = append(got, r.Request+" "+h.Args[0])
		}
	}
	want := []string{"gpus links", "gpus cache", "gpus other", "one links", "one cache"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if len(shared) != 2 || shared[1].Args[0] != "cache" {
		t.Error("the device's own hooks were changed")
	}
}
