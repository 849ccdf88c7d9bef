package families_test

import (
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
)

// firstEntry matches the start of the entries of a recorded host.
var firstEntry = regexp.MustCompile(`(?m)^-- `)

// healthyHosts returns one recorded host of each family, the first that is not broken.
func healthyHosts(t *testing.T) (hosts []string) {
	t.Helper()
	all, err := filepath.Glob("*/testdata/*.host")
	if err != nil || len(all) == 0 {
		t.Fatalf("no recorded hosts (%v)", err)
	}
	folder := ""
	for _, file := range all {
		if own := path.Dir(path.Dir(file)); own != folder && !strings.Contains(file, "broken") {
			folder, hosts = own, append(hosts, file)
		}
	}
	return hosts
}

// functionsOf returns the devices of a snapshot that are PCI functions or partitions of PCI
// functions.
func functionsOf(s *discovery.Snapshot) []discovery.Device {
	return slices.DeleteFunc(slices.Clone(s.Devices), func(d discovery.Device) bool { return !sysfs.IsPCIAddress(path.Base(d.Source)) })
}

// The common health readings of PCI functions apply to the devices of all families.
func TestReadingsOfAnyFunction(t *testing.T) {
	seen := make(map[string]bool)
	for i, file := range healthyHosts(t) {
		if discoverytest.IsBrief() && i%4 != 0 {
			continue
		}
		before := functionsOf(scan.ReadHost(discoverytest.ReadHost(t, file), families.All))
		var entries strings.Builder
		added := make(map[string]bool)
		for _, d := range before {
			if !added[d.Source] {
				added[d.Source] = true
				entries.WriteString("-- " + d.Source + "/aer_dev_fatal --\nDLP 3\nTOTAL_ERR_FATAL 3\n")
				entries.WriteString("-- " + d.Source + "/hwmon/hwmon99/temp1_crit --\n95000\n-- " + d.Source + "/hwmon/hwmon99/temp1_input --\n96000\n")
			}
		}
		host := rewritten(t, file, func(text string) string {
			at := firstEntry.FindStringIndex(text)[0]
			return text[:at] + entries.String() + text[at:]
		})
		after := scan.ReadHost(host, families.All)
		for _, d := range before {
			got, _ := after.Lookup(d.Name)
			for _, condition := range []discovery.Condition{discovery.ConditionFatalErrors, discovery.ConditionOverTemperature} {
				if !slices.ContainsFunc(got.Readings, func(h discovery.Health) bool { return h.Condition == condition }) {
					t.Errorf("%s: %s of family %s has no reading %s: %+v", file, d.Name, d.Family, condition, got.Readings)
				}
			}
			seen[d.Family] = true
		}
	}
	if !discoverytest.IsBrief() && len(seen) < 15 {
		t.Errorf("only families %v have such PCI functions", seen)
	}
}

// A device whose driver is unbound while the agent runs is reported as unbound, in every family.
func TestDriverUnbound(t *testing.T) {
	seen := make(map[string]bool)
	for i, file := range healthyHosts(t) {
		if discoverytest.IsBrief() && i%4 != 0 {
			continue
		}
		last := scan.RescanHost(discoverytest.ReadHost(t, file), families.All, nil)
		functions := functionsOf(last.Snapshot())
		host := rewritten(t, file, func(text string) string { return unboundText(text, functions) })
		now := scan.RescanHost(host, families.All, last).Snapshot()
		for _, d := range functions {
			if d.OptIn || len(d.Includes) > 0 {
				continue // consists of several functions
			}
			got, found := now.Lookup(d.Name)
			if !found {
				got, found = now.Lookup(d.Silicon())
			}
			if !found || got.Health.Key() != discovery.ConditionDriverUnbound {
				t.Errorf("%s: %s of family %s: found %t, %+v", file, d.Name, d.Family, found, got.Health)
			}
			seen[d.Family] = true
		}
	}
	if !discoverytest.IsBrief() && len(seen) < 15 {
		t.Errorf("only families %v have such PCI functions", seen)
	}
}

// unboundText returns a recorded host's text without the drivers of functions, their child
// directories, and links to these directories.
func unboundText(text string, functions []discovery.Device) string {
	head, rest, _ := strings.Cut(text, "\n-- ")
	var kept strings.Builder
	kept.WriteString(head + "\n")
	for one := range strings.SplitSeq(rest, "\n-- ") {
		name, _, _ := strings.Cut(one, " ")
		line, _, _ := strings.Cut(one, "\n")
		made := slices.ContainsFunc(functions, func(d discovery.Device) bool {
			below, under := strings.CutPrefix(name, d.Source+"/")
			return under && (below == "driver" || strings.Contains(below, "/")) ||
				!under && strings.Contains(line, path.Base(d.Source)+"/")
		})
		if !made {
			kept.WriteString("-- " + one + "\n")
		}
	}
	return kept.String()
}
