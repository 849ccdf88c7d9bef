package families_test

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/deployments"
	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/docs"
)

// Each family has a page with facts from the family's code and its recorded hosts. With -update the
// test writes the facts.
func TestDocsOfFamilies(t *testing.T) {
	update := flag.Lookup("update").Value.String() == "true"
	classes, err := deployments.DeviceClasses()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families.All {
		t.Run(f.Name, func(t *testing.T) {
			page := filepath.Join("../../docs/families", f.Name+".md")
			hosts, err := filepath.Glob(filepath.Join(strings.ReplaceAll(f.Name, "-", ""), "testdata", "*.host"))
			if err != nil || len(hosts) == 0 {
				t.Fatalf("no recorded hosts: %v", err)
			}
			docs.CompareSection(t, page, "facts", facts(t, f, hosts, classes), update)
			docs.CompareSection(t, page, "hosts", comments(t, hosts), update)
		})
	}
}

// Every page belongs to an existing family.
func TestPagesHaveFamilies(t *testing.T) {
	pages, err := filepath.Glob("../../docs/families/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		name := strings.TrimSuffix(filepath.Base(page), ".md")
		if !slices.ContainsFunc(families.All, func(f *discovery.Family) bool { return f.Name == name }) {
			t.Errorf("there is no family %s", name)
		}
	}
}

// facts returns a table with the facts of a family and its recorded hosts.
func facts(t *testing.T, f *discovery.Family, hosts []string, classes []resourceapi.DeviceClass) string {
	var devices []discovery.Device
	var example *discovery.Device
	for _, host := range hosts {
		found := scan.ReadHost(discoverytest.ReadHost(t, host), []*discovery.Family{f}).Devices
		devices = append(devices, found...)
		for i := range found {
			if says(&found[i]) > says(example) && filepath.Base(host) != "broken.host" {
				example = &found[i]
			}
		}
	}
	var text strings.Builder
	row := func(what string, values ...string) {
		if len(values) > 0 {
			fmt.Fprintf(&text, "| %s | %s |\n", what, strings.Join(values, ", "))
		}
	}
	text.WriteString("| | |\n|---|---|\n")
	row("kernel devices", matches(f)...)
	row("DeviceClasses", classesOf(t, devices, classes)...)
	if f.FromConfig {
		row("extended resources", "names that you choose")
	} else {
		row("extended resources", classicNames(devices)...)
	}
	row("attributes", attributes(devices)...)
	row("capacities", capacities(devices)...)
	row("driver roots", code(f.Roots)...)
	var parameters []string
	for _, p := range f.Parameters {
		parameters = append(parameters, fmt.Sprintf("[`%s`](../claim-parameters.md)", p))
	}
	row("claim parameters", parameters...)
	if n := len(f.Variables); n > 0 {
		row("environment variables that claims can set", fmt.Sprintf("[%d, for the vendor's libraries](../claim-parameters.md#environment)", n))
	}
	if len(f.Labels) > 0 {
		row("node labels", "as the [vendor's labeller](../node-labels.md)")
	}
	describe(f, example, row)
	return text.String()
}

// comments returns a table with the comments of recorded hosts.
func comments(t *testing.T, hosts []string) string {
	var text strings.Builder
	text.WriteString("| recorded host | |\n|---|---|\n")
	for _, host := range hosts {
		fmt.Fprintf(&text, "| [%s](../../discovery/families/%s) | %s |\n",
			strings.TrimSuffix(filepath.Base(host), ".host"), filepath.ToSlash(host), comment(t, host))
	}
	return text.String()
}

// says rates a device as an example: healthy devices with many properties rate highest.
func says(d *discovery.Device) int {
	if d == nil || d.Health.Status != discovery.Healthy && d.Health.Status != "" {
		return -1
	}
	score := len(d.Attributes) + 5*len(d.Capacity) + 5*len(d.Edits.Env)
	if len(d.PluginOffers) > 0 && !d.PluginOffers[0].IsUnnamed() {
		score += 20
	}
	return score
}

// describe adds rows about one device and the container edits for the device.
func describe(f *discovery.Family, d *discovery.Device, row func(string, ...string)) {
	row("example device", "`"+d.Name+"`")
	var grant specs.ContainerEdits
	if len(d.PluginOffers) > 0 {
		offer := d.PluginOffers[0]
		name := "`" + offer.Resource + "`"
		if offer.IsUnnamed() {
			name = "with a name that you choose"
		}
		ids := code(offer.IDs)
		if len(ids) > 2 {
			ids = append(ids[:1], "…")
		}
		row("its ID in the device plugin API", name+": "+strings.Join(ids, ", "))
		if f.Grant != nil {
			resource := strings.Replace(offer.Resource, "*", "name", 1)
			if offer.Resource == discovery.AnyName {
				resource = "example.com/name"
			}
			grant = f.Grant([]discovery.Device{*d}, discovery.Grant{API: discovery.ModeDevicePlugin, Resource: resource})
		}
	}
	edits := discovery.Join(d.Edits, grant)
	var nodes, mounts []string
	for _, node := range edits.DeviceNodes {
		nodes = append(nodes, node.Path)
	}
	for _, mount := range edits.Mounts {
		mounts = append(mounts, mount.ContainerPath)
	}
	row("its device nodes", code(unique(nodes))...)
	row("its mounts", few(code(unique(mounts)), 4)...)
	row("its environment variables", code(unique(edits.Env))...)
}

// matches lists the kernel devices that a family matches.
func matches(f *discovery.Family) []string {
	var all []string
	if len(f.Match) == 0 {
		return nil
	}
	for _, m := range f.Match {
		if m.Unbound {
			continue // the same devices without a driver
		}
		var says []string
		for _, part := range []struct{ what, value string }{
			{"driver", m.Driver}, {"vendor", m.Vendor}, {"device", m.Device}, {"class", m.PCIClass}, {"name", m.Name},
		} {
			if part.value != "" {
				says = append(says, fmt.Sprintf("%s `%s`", part.what, part.value))
			}
		}
		where := "PCI functions"
		if m.Class != "" {
			where = "`/sys/class/" + m.Class + "`"
		} else if m.Bus != "pci" {
			where = "bus `" + m.Bus + "`"
		}
		if len(says) > 0 {
			where += " with " + strings.Join(says, ", ")
		}
		all = append(all, where)
	}
	return []string{strings.Join(few(all, 6), "; ")}
}

// few returns the first names of a long list.
func few(all []string, most int) []string {
	if len(all) <= most {
		return all
	}
	return append(slices.Clone(all[:most]), fmt.Sprintf("and %d more", len(all)-most))
}

// classesOf returns the classes that select any of the devices, with the extended resources of the
// classes.
func classesOf(t *testing.T, devices []discovery.Device, classes []resourceapi.DeviceClass) []string {
	var names []string
	for _, class := range classes {
		selector, err := rules.Compile(class.Spec.Selectors[0].CEL.Expression)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(devices, func(d discovery.Device) bool { selected, _ := selector.SelectsDevice(d); return selected }) {
			continue
		}
		name := "`" + class.Name + "`"
		if class.Spec.ExtendedResourceName != nil {
			name += " (`" + *class.Spec.ExtendedResourceName + "`)"
		}
		names = append(names, name)
	}
	return names
}

// classicNames returns the resource names of devices in the device plugin API.
func classicNames(devices []discovery.Device) []string {
	var own, named []string
	yours := false
	for _, d := range devices {
		for _, offer := range d.PluginOffers {
			switch {
			case offer.Resource == discovery.AnyName:
				yours = true
			case offer.IsUnnamed() || offer.Optional || d.OptIn:
				named = append(named, "`"+offer.Resource+"` (if you name it)")
			default:
				own = append(own, "`"+offer.Resource+"`")
			}
		}
	}
	names := append(unique(own), unique(named)...)
	if yours {
		names = append(names, "names that you choose")
	}
	return names
}

// attributes returns the attributes of devices, attributes common to all families first.
func attributes(devices []discovery.Device) []string {
	seen := make(map[string]bool)
	for _, d := range devices {
		for name := range d.Attributes {
			seen[string(name)] = true
		}
	}
	return code(slices.Sorted(maps.Keys(seen)))
}

func capacities(devices []discovery.Device) []string {
	seen := make(map[string]bool)
	for _, d := range devices {
		for name := range d.Capacity {
			seen[string(name)] = true
		}
	}
	return code(slices.Sorted(maps.Keys(seen)))
}

// settings begin lines of comments that set fields of the host; see [discoverytest.Run].
var settings = []string{"root", "hooks", "paths", "pools", "passthrough", "partitioning", "virtual functions"}

// comment returns the comment of a recorded host on one line, without settings.
func comment(t *testing.T, host string) string {
	data, err := os.ReadFile(host)
	if err != nil {
		t.Fatal(err)
	}
	h, err := recorded.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(h.Comment()) {
		line = strings.TrimSpace(line)
		setting, _, _ := strings.Cut(line, ": ")
		if slices.Contains(settings, setting) {
			continue
		}
		lines = append(lines, line)
	}
	return strings.ReplaceAll(strings.TrimSpace(strings.Join(lines, " ")), "|", `\|`)
}

func code(names []string) []string {
	var all []string
	for _, name := range names {
		all = append(all, "`"+name+"`")
	}
	return all
}

// unique returns the names without duplicates, in the order of first occurrence.
func unique(names []string) []string {
	var once []string
	for _, name := range names {
		if !slices.Contains(once, name) {
			once = append(once, name)
		}
	}
	return once
}
