package discovery_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

func TestValidate(t *testing.T) {
	family := func(name string, match discovery.Match) *discovery.Family {
		return &discovery.Family{
			Name: name, Doc: "test", Match: []discovery.Match{match},
			Describe: func(*discovery.Host, []sysfs.Device) ([]discovery.Device, []discovery.Problem) { return nil, nil },
		}
	}
	misc := discovery.Match{Class: "misc"}
	good := family("good", misc)
	for name, test := range map[string]struct {
		families []*discovery.Family
		want     string
	}{
		"good":              {[]*discovery.Family{good}, ""},
		"twice":             {[]*discovery.Family{good, good}, "family good: listed twice"},
		"name":              {[]*discovery.Family{family("Not_a_label", misc)}, "family Not_a_label: name:"},
		"bus and class":     {[]*discovery.Family{family("f", discovery.Match{Bus: "pci", Class: "misc"})}, "either a bus or a class"},
		"pattern":           {[]*discovery.Family{family("f", discovery.Match{Bus: "pci", Name: "["})}, "name \"[\""},
		"vendor of a class": {[]*discovery.Family{family("f", discovery.Match{Class: "misc", Vendor: "10de"})}, "are of bus pci"},
		"driver of unbound": {[]*discovery.Family{family("f", discovery.Match{Bus: "pci", Driver: "d", Unbound: true})}, "needs a match of its own"},
		"empty":             {[]*discovery.Family{{Name: "f"}}, "describe: missing"},
	} {
		t.Run(name, func(t *testing.T) {
			err := discovery.Validate(test.families)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestGranters(t *testing.T) {
	grant := func(given []discovery.Device, _ discovery.Grant) specs.ContainerEdits {
		return specs.ContainerEdits{Env: []string{fmt.Sprint(given[0].Family, len(given))}}
	}
	granter := discovery.JoinGranters([]*discovery.Family{{Name: "a", Grant: grant}, {Name: "b"}, {Name: "c", Grant: grant}, {Name: "d", Grant: grant}})
	got := granter([]discovery.Device{{Family: "c"}, {Family: "a"}, {Family: "b"}, {Family: "a"}}, discovery.Grant{}).Env
	if diff := cmp.Diff([]string{"a2", "c1"}, got); diff != "" {
		t.Error(diff)
	}
}
