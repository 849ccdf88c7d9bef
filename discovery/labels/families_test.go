package labels_test

import (
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/labels"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
)

const testdata = "../families/*/testdata/*.host"

// recordedHosts returns the files of all recorded hosts.
func recordedHosts(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(testdata)
	if err != nil || len(files) == 0 {
		t.Fatalf("no recorded hosts (%v)", err)
	}
	return files
}

// scanFile returns the offered devices of a recorded host without an administrator's rules.
func scanFile(t *testing.T, file string) *rules.Snapshot {
	t.Helper()
	return new(rules.Rules).ApplyTo(scan.ReadHost(discoverytest.ReadHost(t, file), families.All))
}

// Node Feature Discovery accepts the labels of each recorded host. Labels of families with labels
// of their own are in a golden file beside the host, which -update rewrites.
func TestRecordedHosts(t *testing.T) {
	for _, file := range recordedHosts(t) {
		folder := strings.Split(filepath.ToSlash(file), "/")[2]
		family := families.All[slices.IndexFunc(families.All, func(f *discovery.Family) bool {
			return strings.ReplaceAll(f.Name, "-", "") == folder
		})]
		t.Run(folder+"/"+strings.TrimSuffix(filepath.Base(file), ".host"), func(t *testing.T) {
			t.Parallel()
			made, err := labels.NodeLabels(scanFile(t, file), families.All)
			if err != nil {
				t.Error(err)
			}
			if _, err := labels.File(made); err != nil {
				t.Error(err)
			}
			if len(family.Labels) > 0 {
				discoverytest.CompareGolden(t, strings.TrimSuffix(file, ".host")+".golden.labels", []byte(labels.Lines(made)))
			}
		})
	}
}

// Every label of a family occurs on a recorded host, at least if the administrator offers
// partitions as whole devices. Other tests cover labels of hosts with different devices.
func TestEveryLabelIsMade(t *testing.T) {
	single := selected(t, `device.attributes["chandler.dev"].?function.orValue("") == "partition"`, "nvidia.com/gpu")
	made := make(map[string]bool)
	for _, file := range recordedHosts(t) {
		found := scan.ReadHost(discoverytest.ReadHost(t, file), families.All)
		for _, r := range []*rules.Rules{{}, single} {
			all, _ := labels.NodeLabels(r.ApplyTo(found), families.All)
			for name := range all {
				made[name] = true
			}
		}
	}
	for _, f := range families.All {
		for _, l := range f.Labels {
			for name := range l.Set {
				if l.If != discovery.Disputed && !isMade(name, made) {
					t.Errorf("family %s: no recorded host has the label %s", f.Name, name)
				}
			}
		}
	}
}

// isMade reports whether a label with the name exists. The name may contain words in braces.
func isMade(name string, made map[string]bool) bool {
	before, rest, hasWord := strings.Cut(name, "{")
	if !hasWord {
		return made[name]
	}
	after := rest[strings.LastIndex(rest, "}")+1:]
	for other := range made {
		if strings.HasPrefix(other, before) && strings.HasSuffix(other, after) {
			return true
		}
	}
	return false
}

// selected returns rules that offer the devices selected by an expression under a name.
func selected(t *testing.T, expression, resource string) *rules.Rules {
	t.Helper()
	selector, err := rules.Compile(expression)
	if err != nil {
		t.Fatal(err)
	}
	return &rules.Rules{Resources: []rules.Resource{{Selector: selector, Name: resource}}}
}

// For any attributes of a host, Node Feature Discovery accepts the labels, or the labels are left
// out with an error. The same host always gives the same labels.
func TestRandomHosts(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, file := range recordedHosts(t) {
		found := scanFile(t, file)
		for range 10 {
			s := &rules.Snapshot{Devices: slices.Clone(found.Devices)}
			for i := range s.Devices {
				garble(random, &s.Devices[i])
			}
			made, _ := labels.NodeLabels(s, families.All)
			text, err := labels.File(made)
			if err != nil {
				t.Errorf("%s: %v", file, err)
			}
			if diff := cmp.Diff(made, parsed(string(text))); diff != "" {
				t.Errorf("%s: Node Feature Discovery would read another thing (-made +read):\n%s", file, diff)
			}
			again, _ := labels.NodeLabels(s, families.All)
			if diff := cmp.Diff(made, again); diff != "" {
				t.Errorf("%s: the labels of one snapshot differ:\n%s", file, diff)
			}
		}
	}
}

// parsed returns the labels of a feature file by the documented rules of Node Feature Discovery: a
// name, and a value or true, in each line that is not a comment.
func parsed(text string) map[string]string {
	read := make(map[string]string)
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, value, hasValue := strings.Cut(line, "=")
		if !hasValue {
			value = "true"
		}
		read[name] = value
	}
	return read
}

// garble sets texts of a device to values that are invalid in labels.
func garble(random *rand.Rand, d *rules.Offered) {
	text := func() string {
		pieces := []string{"NVIDIA", " ", "  ", "/", "(R)", "™", "-", "_", ".", "=", "\n", "{model}", "{count}", strings.Repeat("x", 60), "é", "80GB", ""}
		var text strings.Builder
		for range random.IntN(6) {
			text.WriteString(pieces[random.IntN(len(pieces))])
		}
		return text.String()
	}
	attributes := make(discovery.Attributes)
	for name, attribute := range d.Attributes {
		attributes[name] = attribute
		if attribute.StringValue != nil && name != "kind" && name != "function" {
			value := text()
			attribute.StringValue = &value
			attributes[name] = attribute
		}
	}
	d.Attributes = attributes
	facts := make(map[string]string)
	for word := range d.Facts {
		facts[word] = text()
	}
	d.Facts = facts
}
