package discovery

import (
	"context"
	"errors"
	"strings"
	"testing"
)

// JoinConfigurers takes over the family's new description, and keeps later changes to the device.
func TestConfigurers(t *testing.T) {
	errWork := errors.New("no power")
	described := Device{Name: "p", Source: "sys/new", Attributes: Attributes{}, PluginOffers: []Offer{{Resource: "a.b/new"}}}
	described.Attributes.SetString("afuID", "1")
	var work Work
	var refusal error
	families := []*Family{{Name: "gpu"}, {Name: "fpga", Configure: func(*Host, Device, Parameters) (Device, Work, error) {
		return described, work, refusal
	}}}
	configure := JoinConfigurers(&Host{}, families)
	want := Parameters{"acceleratorFunction": "1"}
	before := Device{Name: "p", Family: "fpga", Health: Health{Status: Unknown, Stale: true}, PartOf: &Silicon{Name: "card"}, Source: "sys/old"}

	now, got, err := configure(before, want, "claim")
	if err != nil || got != nil {
		t.Errorf("what is as wanted: work %t, %v", got != nil, err)
	}
	if now.Source != "sys/new" || now.Attributes.String("afuID") != "1" || now.Attributes.String("family") != "fpga" {
		t.Errorf("not read again: %+v", now)
	}
	if family := described.Attributes.String("family"); family != "" {
		t.Errorf("the family's device is modified: it has the family %q", family)
	}
	if !now.Health.Stale || now.PartOf == nil || len(now.PluginOffers) > 0 {
		t.Errorf("what was made of it since it was found is lost: %+v", now)
	}

	work = func(context.Context) error { return errWork }
	if _, got, err = configure(before, want, "claim"); err != nil || got == nil {
		t.Fatalf("what is not as wanted: work %t, %v", got != nil, err)
	}
	if err := got(t.Context()); !errors.Is(err, errWork) || !strings.Contains(err.Error(), "device p") {
		t.Errorf("error of the work: %v", err)
	}
	work = func(context.Context) error { return nil }
	if _, got, err = configure(before, want, "claim"); err != nil {
		t.Fatal(err)
	}
	if err := got(t.Context()); err == nil || !strings.Contains(err.Error(), "device p: it is not as it was wanted") {
		t.Errorf("work that did not help: %v", err)
	}
	for name, d := range map[string]Device{"of no family with work": {Name: "g", Family: "gpu"}, "of no known family": {Name: "x"}} {
		if _, got, err := configure(d, want, "claim"); got != nil || err != nil {
			t.Errorf("%s: work %t, %v", name, got != nil, err)
		}
	}
	if now, got, err := configure(before, nil, "claim"); got != nil || err != nil || now.Source != "sys/old" {
		t.Errorf("asked for nothing: %+v, work %t, %v", now, got != nil, err)
	}
	refusal = errors.New("no bitstream")
	if _, _, err := configure(before, want, "claim"); !errors.Is(err, refusal) || !strings.Contains(err.Error(), "device p") {
		t.Errorf("refused: %v", err)
	}
	refusal, described.Edits.Env = nil, []string{"no variable"}
	if _, _, err := configure(before, want, "claim"); err == nil || !strings.Contains(err.Error(), "read again") {
		t.Errorf("what cannot be handed out passes: %v", err)
	}
}
