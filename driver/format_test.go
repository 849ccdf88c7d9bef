package driver

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

var newRecords = flag.Bool("new-records", false, "write the golden records that are not there yet; none is ever changed")

// goldenRecords is the directory of a version's records and their CDI specs.
func goldenRecords(version int) string { return fmt.Sprintf("testdata/records/v%d", version) }

// golden is a claim with a golden record.
type golden struct {
	claim   *resourceapi.ResourceClaim
	devices []rules.Offered
	granted specs.ContainerEdits
	since   int // first version that supports the claim
}

// goldenClaims are claims whose records together contain all possible fields, except those of
// devices under configuration.
func goldenClaims() map[string]golden {
	share := func(r *resourceapi.DeviceRequestAllocationResult) {
		shared := taking(claim("x", r.Device), "memory", "3Gi").Status.Allocation.Devices.Results[0]
		r.ShareID, r.ConsumedCapacity = shared.ShareID, shared.ConsumedCapacity
	}
	results := func(c *resourceapi.ResourceClaim, change ...func(*resourceapi.DeviceRequestAllocationResult)) *resourceapi.ResourceClaim {
		for i := range change {
			change[i](&c.Status.Allocation.Devices.Results[i])
		}
		return c
	}
	same := func(*resourceapi.DeviceRequestAllocationResult) {}
	card := gpu("card", 1)
	card.Edits.Mounts = []*specs.Mount{{HostPath: "/opt/lib", ContainerPath: "/usr/lib/gpu", Options: []string{"ro", "bind"}}}
	card.Edits.Hooks = []*specs.Hook{{HookName: "createContainer", Path: "/opt/bin/hook", Args: []string{"hook", "--ldconfig"}}}
	card.Edits.Env = []string{"CARD=<1>"}
	return map[string]golden{
		"whole": {claim: claim("whole", "card", "kvm"), devices: []rules.Offered{card, {Device: discovery.Device{Name: "kvm", Shareable: true}}}},
		"parts": {claim: claim("parts", "g-a", "g-b"), devices: []rules.Offered{pooltest.PartDevice("g", "g-a", 3), pooltest.PartDevice("g", "g-b", 1)}},
		"share": {claim: results(claim("share", "big"), share), devices: []rules.Offered{byMemory("big", 8)}},
		"numbered-share": {
			claim:   claim("numbered-share", "small-share-01"),
			devices: []rules.Offered{byNumber("small", 2)},
		},
		"network": {
			claim: results(claim("network", "nic"), func(r *resourceapi.DeviceRequestAllocationResult) { r.Request = "net/fast" }), devices: []rules.Offered{nic("nic")},
			granted: specs.ContainerEdits{NetDevices: []*specs.LinuxNetDevice{{HostInterfaceName: "ens1f0v2", Name: "net1"}}},
		},
		"limits": {claim: limits(claim("limits", "card")), devices: []rules.Offered{card}, since: 4},
		"administration": {
			claim:   results(claim("administration", "card", "g-a"), same, func(r *resourceapi.DeviceRequestAllocationResult) { r.AdminAccess = new(true) }),
			devices: []rules.Offered{card, pooltest.PartDevice("g", "g-a", 3)},
		},
	}
}

// limits turns a claim into a claim that the scheduler made for the extended resources of a pod.
func limits(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	c.Annotations = map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"}
	c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "pod-of-limits", Controller: new(true)}}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: c.Status.Allocation.Devices.Results[0].Request, Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "cards"}}}
	return c
}

// goldenBench is a driver with the devices of a golden claim.
func goldenBench(t *testing.T, g golden) *bench {
	b := newBench(t)
	b.withFiles()
	b.has("ens1f0v2")
	b.config.ResourceOf = func(class string) string { return "example.com/" + class }
	b.config.Granter = func([]discovery.Device, discovery.Grant) specs.ContainerEdits { return g.granted }
	return b.restart().offers(g.devices...)
}

// formatOf returns the decoded file without times, environment variables and the checksum. New
// variables may be added at any time.
func formatOf(t *testing.T, data []byte) any {
	t.Helper()
	if bytes.HasPrefix(data, []byte("sha256:")) {
		_, data, _ = bytes.Cut(data, []byte("\n"))
	}
	var object any
	if err := json.Unmarshal(data, &object); err != nil {
		t.Fatal(err)
	}
	return withoutVariables(object)
}

func withoutVariables(value any) any {
	switch value := value.(type) {
	case []any:
		for i := range value {
			value[i] = withoutVariables(value[i])
		}
	case map[string]any:
		if since, found := value["since"].(string); found {
			_, err := time.Parse(time.RFC3339, since)
			value["since"] = fmt.Sprintf("a time: %t", err == nil)
		}
		for name := range value {
			value[name] = withoutVariables(value[name])
		}
		if env, found := value["env"].([]any); found {
			value["env"] = fmt.Sprintf("%T", env[0])
		}
	}
	return value
}

// The files written today equal the golden records of the present version. Any difference is a
// change of the format, and requires a new version (see record).
func TestRecordsAreWrittenAsTheirVersionSays(t *testing.T) {
	check := func(t *testing.T, name, file string) {
		t.Helper()
		got, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		name = filepath.Join(goldenRecords(allocation.Version), name)
		want, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) && *newRecords {
			want, err = got, errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, got, 0o644))
		}
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(formatOf(t, want), formatOf(t, got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	for name, g := range goldenClaims() {
		t.Run(name, func(t *testing.T) {
			b := goldenBench(t, g)
			mustPrepare(t, b, g.claim)
			check(t, name+".record", b.recordFile(g.claim))
			check(t, name+".json", b.specFile(g.claim))
		})
	}
	t.Run("configuring", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b, f := newFPGAs(t)
			f.hold = make(chan struct{})
			defer close(f.hold)
			c := wanting("new", claim("configuring", "a"))
			if _, err := b.call(c); err == nil {
				t.Fatal("prepared")
			}
			check(t, "configuring.record", b.recordFile(c))
		})
	})
}

// Records of all versions remain readable: their devices are allocated, CDI specs are rewritten
// from them, Prepare answers from them, and Unprepare releases the devices.
func TestRecordsOfEveryVersionAreHonoured(t *testing.T) {
	for version := 1; version <= allocation.Version; version++ {
		for name, g := range goldenClaims() {
			if version < g.since {
				continue
			}
			t.Run(fmt.Sprintf("version %d, %s", version, name), func(t *testing.T) {
				data, err := os.ReadFile(filepath.Join(goldenRecords(version), name+".record"))
				if err != nil {
					t.Fatal(err)
				}
				spec, err := os.ReadFile(filepath.Join(goldenRecords(version), name+".json"))
				if err != nil {
					t.Fatal(err)
				}
				honours(t, goldenBench(t, g), g, data, spec)
			})
		}
		t.Run(fmt.Sprintf("version %d, configuring", version), func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join(goldenRecords(version), "configuring.record"))
			if err != nil {
				t.Fatal(err)
			}
			b, f := newFPGAs(t)
			c := wanting("new", claim("configuring", "a"))
			if err := os.WriteFile(b.recordFile(c), data, 0o600); err != nil {
				t.Fatal(err)
			}
			b.restart().offers(gpu("a", 1))
			mustRefuse(t, b, claim("rival", "a"), "in use by claim default/configuring")
			mustPrepare(t, b, c)
			if f.begun() != "a=new" {
				t.Errorf("begun: %q", f.begun())
			}
		})
	}
}

// honours checks that the driver follows the record of a claim and leaves the record unchanged.
func honours(t *testing.T, b *bench, g golden, data, spec []byte) {
	t.Helper()
	if err := os.WriteFile(b.recordFile(g.claim), data, 0o600); err != nil {
		t.Fatal(err)
	}
	b.restart()
	for _, r := range g.claim.Status.Allocation.Devices.Results {
		device, found := b.offers(g.devices...).view.Load().Device(r.Device)
		if !found {
			t.Fatalf("no device %s", r.Device)
		}
		who, held := b.OwnerOf(device.Silicon())
		if want := r.AdminAccess == nil && !device.Shareable; held != want || held && who != "claim default/"+g.claim.Name {
			t.Errorf("device %s is in use by %q", r.Device, who)
		}
	}
	before, err := allocation.DecodeClaim(data)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range before.Files() {
		if text, err := os.ReadFile(filepath.Join(b.hostFiles.Root, f.Path)); err != nil || string(text) != f.Text {
			t.Errorf("host file %s: %q, %v", f.Path, text, err)
		}
	}
	same := func(when string) {
		t.Helper()
		for file, want := range map[string][]byte{b.recordFile(g.claim): data, b.specFile(g.claim): spec} {
			got, err := os.ReadFile(file)
			if diff := cmp.Diff(string(want), string(got)); err != nil || diff != "" {
				t.Errorf("%s: %v (-want +got):\n%s", when, err, diff)
			}
		}
	}
	same("at start")
	if got := len(mustPrepare(t, b, g.claim)); got != len(g.claim.Status.Allocation.Devices.Results) {
		t.Errorf("Prepare answers with %d devices", got)
	}
	same("prepared")
	if err := b.tryUnprepare(g.claim); err != nil {
		t.Fatal(err)
	}
	if exists(b.recordFile(g.claim)) || exists(b.specFile(g.claim)) {
		t.Error("something is left of the claim")
	}
}

// newer returns a golden record in the form of a later agent: with another version, and with an
// additional field in each object except the edits, whose fields must all be supported.
func newer(t *testing.T, name string, version, readableBy int) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(goldenRecords(allocation.Version), name+".record"))
	if err != nil {
		t.Fatal(err)
	}
	_, body, _ := bytes.Cut(data, []byte("\n"))
	var r map[string]any
	if err := json.Unmarshal(body, &r); err != nil {
		t.Fatal(err)
	}
	addLater(r)
	r["version"], r["readableBy"] = version, readableBy
	if body, err = json.MarshalIndent(r, "", "  "); err != nil {
		t.Fatal(err)
	}
	return append([]byte(checksum(body)+"\n"), body...)
}

// addLater adds a field to all objects of a record.
func addLater(value any) {
	switch value := value.(type) {
	case []any:
		for _, element := range value {
			addLater(element)
		}
	case map[string]any:
		for name, field := range value {
			if name != "edits" && name != "takes" && name != "consumes" {
				addLater(field)
			}
		}
		value["later"] = map[string]any{"x": []any{1, "two", nil}}
	}
}

// A record of the next version is followed like one of the present version, and stays unchanged.
// After a downgrade an agent loses nothing that its successor wrote.
func TestRecordsOfTheNextVersionAreHonoured(t *testing.T) {
	for name, g := range goldenClaims() {
		t.Run(name, func(t *testing.T) {
			spec, err := os.ReadFile(filepath.Join(goldenRecords(allocation.Version), name+".json"))
			if err != nil {
				t.Fatal(err)
			}
			honours(t, goldenBench(t, g), g, newer(t, name, allocation.Version+1, allocation.Version), spec)
		})
	}
}

// When an older agent must rewrite a record, it keeps the version and the unknown fields.
func TestRecordsOfTheNextVersionAreNotDowngraded(t *testing.T) {
	g := goldenClaims()["whole"]
	b := goldenBench(t, g)
	data := newer(t, "whole", allocation.Version+2, allocation.Version)
	if err := os.WriteFile(b.recordFile(g.claim), data, 0o600); err != nil {
		t.Fatal(err)
	}
	b.boot = "boot-2"
	b.restart().offers(g.devices...)
	mustPrepare(t, b, g.claim)
	got, err := os.ReadFile(b.recordFile(g.claim))
	if err != nil {
		t.Fatal(err)
	}
	r, err := allocation.DecodeClaim(got)
	if err != nil {
		t.Fatal(err)
	}
	if r.Version != allocation.Version+2 || r.ReadableBy != allocation.Version || r.Boot != "boot-2" {
		t.Errorf("version %d, readable by %d, of %s", r.Version, r.ReadableBy, r.Boot)
	}
	if n := bytes.Count(got, []byte(`"later"`)); n != 3 {
		t.Errorf("what the later agent wrote is gone:\n%s", got)
	}
}
