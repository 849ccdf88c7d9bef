package placement

import (
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
)

// described summarizes the devices and how they are shared.
func described(s *rules.Snapshot) string {
	var words []string
	for _, d := range s.Devices {
		word := d.Name
		if d.Sharing != nil {
			word += " by " + string(d.Sharing.Capacity)
		}
		if n := d.Shares(); n > 0 {
			word += fmt.Sprintf(" of %d", n)
		}
		words = append(words, word)
	}
	return strings.Join(words, ", ")
}

// Devices that new rules exclude or share otherwise stay unchanged until their physical device is
// released. The new rules apply to all other devices at once.
func TestRuled(t *testing.T) {
	gpu := discovery.Device{Name: "gpu", Capacity: discovery.Capacity{"memory": resourceapi.DeviceCapacity{Value: resource.MustParse("8Gi")}}}
	gpu.PluginOffers = []discovery.Offer{{Resource: "example.com/gpu", IDs: []string{"gpu"}}}
	raw := &discovery.Snapshot{Devices: []discovery.Device{gpu, {Name: "nic"}, {Name: "tpu"}}}
	all := rulestest.CompileSelector(t, `true`)
	plain := &rules.Rules{}
	units := &rules.Rules{Mode: discovery.ModeDRA, Sharing: []rules.Share{{Selector: rulestest.CompileSelector(t, `"memory" in device.capacity["chandler.dev"]`), Capacity: "memory", Unit: resource.MustParse("1Gi")}}}
	replicas := &rules.Rules{Sharing: []rules.Share{{Selector: all, Replicas: 4}}}
	nothing := &rules.Rules{Exclude: []rules.Selector{all}}

	r := newRuled(plain, nil)
	r.applyScan(raw)
	expect := func(step, want string, changing ...string) {
		t.Helper()
		got := r.changingSilicon()
		same := len(got) == len(changing)
		for _, silicon := range changing {
			same = same && got[silicon]
		}
		if described(r.snapshot) != want || !same {
			t.Errorf("%s: %s, changing %v; want %s, changing %v", step, described(r.snapshot), got, want, changing)
		}
	}
	expect("at first", "gpu, nic, tpu")
	r.changeRules(units)
	expect("shared", "gpu, nic, tpu", "gpu")
	if nic, _ := r.snapshot.Lookup("nic"); nic.Mode != discovery.ModeDRA {
		t.Errorf("a device of the same form is not as the rules want it: mode %q", nic.Mode)
	}
	r.release(map[string]bool{"gpu": true})
	expect("released", "gpu by memory, nic, tpu")
	r.changeRules(replicas)
	expect("shared otherwise", "gpu by memory, nic, tpu", "gpu", "nic", "tpu")
	r.applyScan(raw)
	expect("scanned again", "gpu by memory, nic, tpu", "gpu", "nic", "tpu")
	r.changeRules(units)
	expect("as before", "gpu by memory, nic, tpu")
	r.changeRules(nothing)
	expect("excluded", "gpu by memory, nic, tpu", "gpu", "nic", "tpu")
	r.release(map[string]bool{"nic": true})
	expect("one released", "gpu by memory, tpu", "gpu", "tpu")
	r.changeRules(plain)
	expect("not excluded any more", "gpu by memory, nic, tpu", "gpu")
}

// A different number of shares is a different form.
func TestRuledOfAnotherNumber(t *testing.T) {
	by := func(n int) *rules.Rules {
		return &rules.Rules{Sharing: []rules.Share{{Selector: rulestest.CompileSelector(t, `true`), Replicas: n}}}
	}
	r := newRuled(by(4), nil)
	r.applyScan(&discovery.Snapshot{Devices: []discovery.Device{{Name: "gpu"}}})
	r.changeRules(by(8))
	if got := described(r.snapshot); got != "gpu by shares of 4" || !r.changingSilicon()["gpu"] {
		t.Errorf("%s, changing %v", got, r.changingSilicon())
	}
	r.release(map[string]bool{"gpu": true})
	if got := described(r.snapshot); got != "gpu by shares of 8" {
		t.Errorf("released: %s", got)
	}
}

// Rules that replace an unknown configuration apply at once: no device was offered in an earlier
// form, and a claim for a share would otherwise wait for its own end.
func TestRuledAfterNothingWasKnown(t *testing.T) {
	r := newRuled(&rules.Rules{Unknown: "the configuration is invalid"}, nil)
	r.applyScan(&discovery.Snapshot{Devices: []discovery.Device{{Name: "gpu"}}})
	r.keepExcluded(nil)
	r.changeRules(&rules.Rules{Sharing: []rules.Share{{Selector: rulestest.CompileSelector(t, `true`), Replicas: 3}}})
	if got := described(r.snapshot); got != "gpu by shares of 3" || len(r.changingSilicon()) > 0 || r.earlierApplied {
		t.Errorf("%s, changing %v, claims sought %t; want gpu by shares of 3 at once, and claims on excluded devices sought again", got, r.changingSilicon(), r.earlierApplied)
	}
}

// The rules apply at the first scan like a change from the forms of the previous agent: claims may
// be allocated devices in these forms and not be prepared yet.
func TestRuledAfterAnotherAgent(t *testing.T) {
	by := func(n int) *rules.Rules {
		return &rules.Rules{Sharing: []rules.Share{{Selector: rulestest.CompileSelector(t, `true`), Replicas: n}}}
	}
	for name, test := range map[string]struct {
		form     rules.ShareForm
		want     string
		changing bool
	}{
		"the same":  {rules.ShareForm{Capacity: discovery.Shares, Unit: "1", Shares: 3}, "gpu by shares of 3", false},
		"more":      {rules.ShareForm{Capacity: discovery.Shares, Unit: "1", Shares: 4}, "gpu by shares of 4", true},
		"by memory": {rules.ShareForm{Capacity: "memory", Unit: "1Gi"}, "gpu by memory", true},
		"whole":     {rules.ShareForm{}, "gpu", true},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRuled(by(2), map[string]rules.ShareForm{"gpu": test.form, "gone": {}})
			r.changeRules(by(3)) // the configuration changes before the first scan
			gpu := discovery.Device{Name: "gpu", Capacity: discovery.Capacity{"memory": resourceapi.DeviceCapacity{Value: resource.MustParse("8Gi")}}}
			raw := &discovery.Snapshot{Devices: []discovery.Device{gpu, {Name: "new"}}}
			for range 2 {
				r.applyScan(raw)
				r.keepExcluded(viewOf(owners{"gpu": "claim"}, nil))
				if got := described(r.snapshot); got != test.want+", new by shares of 3" || r.changingSilicon()["gpu"] != test.changing || r.changingSilicon()["new"] {
					t.Errorf("%s, changing %v; want %s, changing %t", got, r.changingSilicon(), test.want, test.changing)
				}
			}
			r.release(map[string]bool{"gpu": true})
			if got := described(r.snapshot); got != "gpu by shares of 3, new by shares of 3" {
				t.Errorf("released: %s", got)
			}
		})
	}
}

// Devices that the rules exclude stay in the form of the previous agent until they are released.
// Devices that the previous agent did not offer are excluded at once.
func TestRuledExcludesWhatAnotherAgentOffered(t *testing.T) {
	r := newRuled(&rules.Rules{Exclude: []rules.Selector{rulestest.CompileSelector(t, `true`)}}, map[string]rules.ShareForm{"gpu": {Capacity: discovery.Shares, Unit: "1", Shares: 4}})
	r.applyScan(&discovery.Snapshot{Devices: []discovery.Device{{Name: "gpu"}, {Name: "nic"}}})
	r.keepExcluded(viewOf(owners{"gpu": "claim"}, nil))
	if got := described(r.snapshot); got != "gpu by shares of 4" || !r.changingSilicon()["gpu"] {
		t.Errorf("%s, changing %v", got, r.changingSilicon())
	}
	r.release(map[string]bool{"gpu": true})
	if got := described(r.snapshot); got != "" {
		t.Errorf("released: %s", got)
	}
}

// While the configuration is unknown, devices stay in the form of the previous agent, and a
// configuration with that form applies at once.
func TestRuledWhileNothingIsKnown(t *testing.T) {
	r := newRuled(&rules.Rules{Unknown: "the configuration is invalid"}, map[string]rules.ShareForm{"gpu": {Capacity: discovery.Shares, Unit: "1", Shares: 3}, "nic": {}})
	r.applyScan(&discovery.Snapshot{Devices: []discovery.Device{{Name: "gpu"}, {Name: "nic"}}})
	if got := described(r.snapshot); got != "gpu by shares of 3, nic" || !r.changingSilicon()["gpu"] {
		t.Errorf("%s, changing %v", got, r.changingSilicon())
	}
	r.changeRules(&rules.Rules{Sharing: []rules.Share{{Selector: rulestest.CompileSelector(t, `true`), Replicas: 3}}})
	if got := described(r.snapshot); got != "gpu by shares of 3, nic by shares of 3" || len(r.changingSilicon()) > 0 {
		t.Errorf("then %s, changing %v", got, r.changingSilicon())
	}
}

// Before the first scan no device can be changing.
func TestRuledBeforeTheFirstScan(t *testing.T) {
	r := newRuled(&rules.Rules{}, nil)
	r.changeRules(&rules.Rules{Mode: discovery.ModeDRA})
	r.applyScan(&discovery.Snapshot{Devices: []discovery.Device{{Name: "gpu"}}})
	if d, _ := r.snapshot.Lookup("gpu"); d.Mode != discovery.ModeDRA || len(r.changingSilicon()) > 0 {
		t.Errorf("mode %q, changing %v", d.Mode, r.changingSilicon())
	}
}

// An excluded device that was allocated to a claim before a restart is not treated as gone.
func TestRuledKeepsWhatClaimsHave(t *testing.T) {
	r := newRuled(&rules.Rules{Exclude: []rules.Selector{rulestest.CompileSelector(t, `true`)}}, nil)
	r.applyScan(&discovery.Snapshot{Devices: []discovery.Device{{Name: "gpu"}, {Name: "nic"}}})
	view := viewOf(owners{"gpu": "claim"}, nil)
	r.keepExcluded(view)
	if described(r.snapshot) != "gpu" || !r.changingSilicon()["gpu"] {
		t.Errorf("%s, changing %v", described(r.snapshot), r.changingSilicon())
	}
	p := PlaceDevices(nil, r.snapshot.Devices, view, Facts{Changing: r.changingSilicon()})
	if p.OfDRA()["gpu"] == "" {
		t.Error("the excluded device is offered")
	}
	r.release(map[string]bool{"gpu": true})
	r.keepExcluded(view)
	if described(r.snapshot) != "" {
		t.Errorf("then %s", described(r.snapshot))
	}
}

// Rules that are read while the agent runs may combine functions that claims have into one physical
// device. Each device is in the snapshot once, under the new rules, or under the earlier ones until
// release if the new rules give the physical device to two APIs.
func TestRuledWhileSiliconGrows(t *testing.T) {
	two := func(name string) discovery.Device {
		d := discovery.Device{Name: name, Source: "sys/devices/" + name, Attributes: discovery.Attributes{}, Passthrough: &discovery.PassthroughOption{Driver: "vfio-pci"}}
		d.Attributes.SetInt("iommuGroup", 3)
		d.Attributes.SetString("model", name)
		d.PluginOffers = []discovery.Offer{{Resource: "*", Optional: true, IDs: []string{name}}}
		return d
	}
	raw := &discovery.Snapshot{Devices: []discovery.Device{two("a"), two("b")}}
	wants := func(selected string, mode discovery.Mode) *rules.Rules {
		return &rules.Rules{Mode: discovery.ModeDRA, Resources: []rules.Resource{{Selector: rulestest.CompileSelector(t, selected), Name: "example.com/vm", Mode: &mode, Want: discovery.Parameters{discovery.Driver: discovery.DriverVFIO}}}}
	}
	view := viewOf(owners{"a": "claim"}, nil)
	for name, test := range map[string]struct {
		to      *rules.Rules
		silicon string // physical device of device a, while a claim has the device a
		after   string // the devices after the release
	}{
		"one API for both": {wants("true", discovery.ModeDRA), "iommu-group-3", "a, b"},
		"two APIs":         {wants(`device.attributes["chandler.dev"].model == "b"`, discovery.ModeDevicePlugin), "a", ""},
	} {
		r := newRuled(&rules.Rules{Mode: discovery.ModeDRA}, nil)
		r.applyScan(raw)
		r.keepSplit(view)
		r.changeRules(test.to)
		r.keepSplit(view)
		a, _ := r.snapshot.Lookup("a")
		if described(r.snapshot) != "a, b" || a.Silicon() != test.silicon {
			t.Errorf("%s: %s; a is of %s, want %s", name, described(r.snapshot), a.Silicon(), test.silicon)
		}
		r.release(r.changingSilicon())
		if described(r.snapshot) != test.after {
			t.Errorf("%s: released: %s", name, described(r.snapshot))
		}
	}
}
