package placement

import (
	"errors"
	"maps"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// owners maps physical devices to their consumers by one API.
type owners map[string]string

// viewOf returns a view of a ledger with physical devices allocated to claims and pods.
func viewOf(claims, pods owners) *ledger.View {
	var entries []allocation.Entry
	for silicon, name := range claims {
		entries = append(entries, claimOf(name, silicon))
	}
	for silicon, name := range pods {
		entries = append(entries, grantOf(name, silicon))
	}
	return ledger.ViewOf(&exclusion.Present{}, entries...)
}

// claimOf returns a claim with devices.
func claimOf(name string, devices ...string) *allocation.Claim {
	c := &allocation.Claim{UID: types.UID(name), Namespace: "n", Name: name}
	for _, device := range devices {
		c.Results = append(c.Results, allocation.Result{Source: device, Silicon: device, Whole: true})
	}
	return c
}

// grantOf returns the allocation of devices to a pod by the device plugin API.
func grantOf(pod string, devices ...string) *allocation.Grant {
	return &allocation.Grant{Resource: "example.com/gpu", ID: devices[0], Devices: devices, Silicon: devices, Exclusive: true, Container: "n/" + pod + " main"}
}

const (
	none    = discovery.ModeAuto
	dra     = discovery.ModeDRA
	classic = discovery.ModeDevicePlugin
)

func TestPlace(t *testing.T) {
	free := &Published{}
	tests := map[string]struct {
		before   discovery.Mode
		mode     discovery.Mode // mode of the device
		auto     discovery.Mode
		open     bool
		dra      owners
		classic  owners
		said     *Published
		changing bool
		unknown  bool // whether the wanted configuration is unknown
		want     discovery.Mode
		moving   bool
		ask      bool
		free     bool
	}{
		"auto goes where the node goes":                        {auto: dra, want: dra},
		"auto waits while the node does not know":              {want: none, moving: true},
		"auto stays while the node does not know":              {before: classic, want: classic},
		"auto, unknown, and a claim has it":                    {dra: owners{"gpu": "claim"}, want: dra},
		"auto, unknown, and a pod has it":                      {classic: owners{"gpu": "pod"}, want: classic},
		"the device's mode counts more":                        {mode: classic, auto: dra, said: free, want: classic},
		"a claim has it":                                       {before: dra, mode: classic, dra: owners{"gpu": "claim"}, want: dra, moving: true},
		"a claim has it, and where it was is lost":             {mode: classic, dra: owners{"gpu": "claim"}, want: dra, moving: true},
		"the API server is asked":                              {before: dra, mode: classic, want: dra, ask: true},
		"the API server names it":                              {before: dra, mode: classic, said: &Published{BySilicon: owners{"gpu": "claim"}}, want: dra, moving: true},
		"the API server names it, and where it was lost":       {mode: classic, said: &Published{BySilicon: owners{"gpu": "claim"}}, want: dra, moving: true},
		"the API server names another":                         {before: dra, mode: classic, said: &Published{BySilicon: owners{"gpu2": "claim"}}, want: classic},
		"the API server does not answer":                       {before: dra, mode: classic, said: &Published{Err: errors.New("timeout")}, want: dra},
		"the API server does not answer, and no API has it":    {mode: classic, said: &Published{Err: errors.New("timeout")}, want: none, moving: true},
		"it changes, and the API server does not answer":       {before: dra, mode: dra, changing: true, said: &Published{Err: errors.New("timeout")}, want: dra, moving: true},
		"a pod has it":                                         {before: classic, auto: dra, classic: owners{"gpu": "pod"}, want: classic, moving: true},
		"a pod has it, and where it was is lost":               {auto: dra, classic: owners{"gpu": "pod"}, want: classic, moving: true},
		"free again":                                           {before: classic, auto: dra, want: dra},
		"back where it is allocated":                           {before: dra, auto: dra, dra: owners{"gpu": "claim"}, want: dra},
		"any number may have it":                               {before: dra, mode: classic, open: true, dra: owners{"gpu": "claim"}, want: classic},
		"unlimited sharing, without a placement":               {open: true, dra: owners{"gpu": "claim"}, want: none, moving: true},
		"it changes, and a claim has it":                       {before: dra, mode: dra, changing: true, dra: owners{"gpu": "claim"}, want: dra, moving: true},
		"it changes, and a claim was allocated it":             {before: dra, mode: dra, changing: true, said: &Published{BySilicon: owners{"gpu": "claim"}}, want: dra, moving: true},
		"it changes, and the API server is asked":              {before: dra, mode: dra, changing: true, want: dra, moving: true, ask: true},
		"it changes, and a pod has it":                         {before: classic, mode: classic, changing: true, classic: owners{"gpu": "pod"}, want: classic, moving: true},
		"it changes, and is free of claims":                    {before: dra, mode: dra, changing: true, said: free, want: dra, free: true},
		"it changes, and is free of pods":                      {before: classic, mode: classic, changing: true, want: classic, free: true},
		"it changes, any number may have it, and a claim does": {before: dra, mode: dra, changing: true, open: true, dra: owners{"gpu": "claim"}, want: dra, moving: true},
		"unknown, without a consumer":                          {before: dra, auto: dra, unknown: true, want: dra, moving: true},
		"unknown, without a consumer in the other API":         {before: classic, auto: dra, unknown: true, want: classic, moving: true},
		"unknown, and it was never placed":                     {auto: dra, unknown: true, want: none, moving: true},
		"unknown, and a claim has it":                          {before: dra, unknown: true, dra: owners{"gpu": "claim"}, want: dra, moving: true},
		"unknown, and a pod has it":                            {before: classic, unknown: true, classic: owners{"gpu": "pod"}, want: classic},
		"unknown, and a pod has it, and where it was is lost":  {unknown: true, classic: owners{"gpu": "pod"}, want: classic},
		"it changes and moves, and a claim has it":             {before: dra, mode: classic, changing: true, dra: owners{"gpu": "claim"}, want: dra, moving: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			before := make(map[string]discovery.Mode)
			if test.before != none {
				before["gpu"] = test.before
			}
			given := maps.Clone(before)
			device := rules.Offered{Device: discovery.Device{Name: "gpu", Shareable: test.open}, Mode: test.mode}
			facts := Facts{AutoMode: test.auto, Published: test.said, Changing: map[string]bool{"gpu": test.changing}}
			if test.unknown {
				facts.Unknown = "wrong"
			}
			p := PlaceDevices(before, []rules.Offered{device}, viewOf(test.dra, test.classic), facts)
			if got := p.API["gpu"]; got != test.want || (p.Moving["gpu"] != "") != test.moving || p.NeedsPublished["gpu"] != test.ask || p.Free["gpu"] != test.free {
				t.Errorf("got API %q, moving %q, ask %t, free %t; want API %q, moving %t, ask %t, free %t", got, p.Moving["gpu"], p.NeedsPublished["gpu"], p.Free["gpu"], test.want, test.moving, test.ask, test.free)
			}
			if !maps.Equal(before, given) {
				t.Errorf("what was before is changed to %v", before)
			}
			if withheld := p.OfDRA()["gpu"] != ""; withheld != (test.moving || test.want == classic) {
				t.Errorf("withheld from DRA: %t", withheld)
			}
			if listed := len(p.ListedDevices([]rules.Offered{device})) == 1; listed != (test.want == classic) {
				t.Errorf("listed: %t", listed)
			}
		})
	}
}

// While it is unknown which devices containers have, no API offers a device without a recorded
// decision.
func TestPlaceWithoutKnownContainers(t *testing.T) {
	l := ledger.New(ledger.Config{Dir: t.TempDir(), Boot: "boot", Listings: true})
	if problems, err := l.Open(t.Context()); err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	devices := []rules.Offered{{Device: discovery.Device{Name: "gpu"}}}
	for before, want := range map[discovery.Mode]discovery.Mode{none: none, classic: classic, dra: dra} {
		for _, auto := range []discovery.Mode{none, dra} {
			p := PlaceDevices(map[string]discovery.Mode{"gpu": before}, devices, l.View(&exclusion.Present{}), Facts{AutoMode: auto})
			if moving := p.Moving["gpu"] != ""; p.API["gpu"] != want || moving != (before == none || before != auto && auto != none) {
				t.Errorf("API %q before, node %q: API %q, moving %t", before, auto, p.API["gpu"], moving)
			}
		}
	}
}

// A card whose second function was unreadable for a while has decisions for the card and for its
// functions. If they differ, no API offers the card before the API server names neither function.
func TestPlaceJoinsDecisions(t *testing.T) {
	card := &discovery.Silicon{Name: "card"}
	devices := []rules.Offered{{Device: discovery.Device{Name: "a", PartOf: card}}, {Device: discovery.Device{Name: "b", PartOf: card}}}
	place := func(before map[string]discovery.Mode, facts Facts) Placement {
		return PlaceDevices(before, devices, viewOf(nil, nil), facts)
	}
	stale := map[string]discovery.Mode{"card": classic, "a": dra, "b": dra}
	if p := place(stale, Facts{}); p.Moving["card"] == "" {
		t.Errorf("the node's API is unknown: %+v", p)
	}
	if p := place(stale, Facts{AutoMode: classic, Published: &Published{BySilicon: map[string]string{"card": "claim"}}}); p.Moving["card"] == "" || p.API["card"] != dra {
		t.Errorf("a claim is allocated a function: %+v", p)
	}
	p := place(stale, Facts{AutoMode: classic, Published: &Published{}})
	if p.Moving["card"] != "" || p.API["card"] != classic || p.API["a"] != classic || p.API["b"] != classic {
		t.Errorf("no claim is allocated a function: %+v", p)
	}
	if p := place(p.API, Facts{}); p.Moving["card"] != "" || p.API["card"] != classic {
		t.Errorf("the decisions agree: %+v", p)
	}
}

// A physical device moves when all its partitions are free, and then as a whole. Unlimited sharing
// of one partition does not apply to the physical device.
func TestPlaceMovesSiliconAsOne(t *testing.T) {
	whole := &discovery.Silicon{Name: "gpu"}
	parts := []rules.Offered{
		{Device: discovery.Device{Name: "gpu-0", PartOf: whole}, Mode: classic},
		{Device: discovery.Device{Name: "gpu-1", PartOf: whole, Shareable: true}, Mode: classic},
	}
	before := map[string]discovery.Mode{"gpu": dra}
	view := viewOf(owners{"gpu": "claim"}, nil)
	if p := PlaceDevices(before, parts, view, Facts{Published: &Published{}}); len(p.ListedDevices(parts)) != 0 || p.API["gpu"] != dra {
		t.Errorf("one part is claimed: %+v", p)
	}
	view = viewOf(nil, nil)
	if p := PlaceDevices(before, parts, view, Facts{Published: &Published{}}); len(p.ListedDevices(parts)) != 2 || p.Moving["gpu"] != "" {
		t.Errorf("no part is claimed: %+v", p)
	}
}

// A physical device that is absent from the host returns to its last API.
func TestPlaceRemembersWhatIsGone(t *testing.T) {
	p := PlaceDevices(map[string]discovery.Mode{"gpu": classic}, nil, viewOf(nil, nil), Facts{AutoMode: dra})
	if p.API["gpu"] != classic {
		t.Errorf("got %+v", p)
	}
}

// A physical device also changes if the earlier settings exclude all its devices, such as an
// excluded virtual function that reappears while the earlier settings still apply to the physical
// function.
func TestPlaceFreesWhatEarlierSettingsExclude(t *testing.T) {
	before := map[string]discovery.Mode{"gpu": dra}
	facts := Facts{Changing: map[string]bool{"gpu": true}, Published: &Published{}}
	if p := PlaceDevices(before, nil, viewOf(owners{"gpu": "claim"}, nil), facts); p.Free["gpu"] || p.Moving["gpu"] == "" {
		t.Errorf("a claim has it: %+v", p)
	}
	if p := PlaceDevices(before, nil, viewOf(nil, nil), facts); !p.Free["gpu"] || p.API["gpu"] != dra {
		t.Errorf("it stays: %+v", p)
	}
}

// A claim with only a CDI spec left keeps its physical device with DRA, even if the spec names a
// numbered share of a device that is no longer shared.
func TestPlaceKeepsSealedShares(t *testing.T) {
	devices := []rules.Offered{{Device: discovery.Device{Name: "gpu"}, Mode: classic}}
	stock := &exclusion.Present{Snapshot: &rules.Snapshot{Devices: devices}}
	view := ledger.ViewOf(stock, &allocation.Sealed{UID: "lost", Devices: []allocation.SealedDevice{{Name: "gpu-share-03"}}})
	if p := PlaceDevices(map[string]discovery.Mode{"gpu": dra}, devices, view, Facts{Published: &Published{}}); p.API["gpu"] != dra {
		t.Errorf("it moves: %+v", p)
	}
}
