package chart

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"

	"chandler.dev/internal/docs"
)

// aValue is a value of the chart with its explanation in values.yaml.
type aValue struct{ name, text string }

// key matches a line of values.yaml that begins a value.
var key = regexp.MustCompile(`^( *)([A-Za-z]+):`)

// explained returns the explained values in order.
func explained(text string) (values []aValue) {
	var path, comment []string
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if said, is := strings.CutPrefix(strings.TrimSpace(line), "#"); is {
			comment = append(comment, strings.TrimSpace(said))
			continue
		}
		if found := key.FindStringSubmatch(line); found != nil {
			path = append(path[:len(found[1])/2], found[2])
			if said, is := strings.CutPrefix(strings.Join(comment, " "), "-- "); is {
				values = append(values, aValue{strings.Join(path, "."), said})
			}
		}
		comment = nil
	}
	return values
}

// TestValuesAreExplained generates the table of values in docs/install.md from values.yaml, with
// defaults and explanations. Every value must have an explanation.
func TestValuesAreExplained(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(chartDir, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	defaults := defaultValues(t)
	var table strings.Builder
	table.WriteString("| value | default | what it is for |\n|---|---|---|\n")
	values := explained(string(data))
	for _, v := range values {
		at, err := json.Marshal(lookUp(t, defaults, v.name))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&table, "| `%s` | `%s` | %s |\n", v.name, at, strings.ReplaceAll(v.text, "|", `\|`))
	}
	for name := range leaves(defaults, "") {
		found := false
		for _, v := range values {
			found = found || name == v.name || strings.HasPrefix(name, v.name+".")
		}
		if !found {
			t.Errorf("values.yaml does not explain %s by a comment that begins with --", name)
		}
	}
	docs.CompareSection(t, filepath.Join(deployments, "../docs/install.md"), "values", table.String(), *update)
}

func lookUp(t *testing.T, in map[string]any, name string) any {
	t.Helper()
	first, rest, deeper := strings.Cut(name, ".")
	value, there := in[first]
	if !there {
		t.Fatalf("there is no value %s", name)
	}
	if below, is := value.(map[string]any); deeper && is {
		return lookUp(t, below, rest)
	}
	return value
}

// leaves returns the names of all values without nested values.
func leaves(in map[string]any, prefix string) map[string]bool {
	all := make(map[string]bool)
	for name, value := range in {
		if below, is := value.(map[string]any); is && len(below) > 0 {
			for name := range leaves(below, prefix+name+".") {
				all[name] = true
			}
			continue
		}
		all[prefix+name] = true
	}
	return all
}

// defaultValues returns the values of values.yaml.
func defaultValues(t *testing.T) (defaults map[string]any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(chartDir, "values.yaml"))
	if err == nil {
		err = yaml.UnmarshalStrict(data, &defaults)
	}
	if err != nil {
		t.Fatal(err)
	}
	return defaults
}

// groups returns the names of all values with nested values.
func groups(in map[string]any, prefix string) (names []string) {
	for name, value := range in {
		if below, is := value.(map[string]any); is && len(below) > 0 {
			names = append(append(names, prefix+name), groups(below, prefix+name+".")...)
		}
	}
	return names
}

// TestValuesOfAnOlderChart removes each group of values in turn. With --reuse-values, Helm uses the
// values of the previous chart, without defaults for new values. The chart must then tell the user
// to write --reset-then-reuse-values.
func TestValuesOfAnOlderChart(t *testing.T) {
	names := groups(defaultValues(t), "")
	if len(names) < 15 {
		t.Fatalf("groups %q", names)
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if out, err := render(t, "", "--set="+name+"=null"); err != nil && !strings.Contains(out, "no values "+name+": if yours are of an older chart, write --reset-then-reuse-values") {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// notes returns Helm's notes for an installation with values.
func notes(t *testing.T, values string) string {
	t.Helper()
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, "install", "chandler", chartDir, "--namespace=chandler", "--dry-run=client", "--hide-secret", "--set=image.repository=registry.example.com/chandler,image.tag=v0.1.0", "--values=-")
	cmd.Stdin = strings.NewReader(values)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	_, said, _ := strings.Cut(string(out), "\nNOTES:\n")
	return said
}

// TestNotesOfPrivilege expects Helm's notes to name the privileged pods, and NVML where it is off.
func TestNotesOfPrivilege(t *testing.T) {
	const group = "{nodeGroups: [{name: a, nodeSelector: {b: c}, %s: {enabled: true}}]}"
	for values, want := range map[string]struct{ privileged, nvml bool }{
		"":                                    {false, true},
		"{nvml: {enabled: true}}":             {true, false},
		"{nvidiaDriver: {root: /}}":           {false, true},
		"{reclaim: {enabled: true}}":          {true, true},
		"{mps: {enabled: true}}":              {false, true},
		fmt.Sprintf(group, "nvml"):            {true, false},
		fmt.Sprintf(group, "fpgaProgramming"): {true, true},
	} {
		out := notes(t, values)
		if strings.Contains(out, "The pods of chandler-host are privileged, and the agents are not.") != want.privileged || strings.Contains(out, "set nvml.enabled=true") != want.nvml {
			t.Errorf("%s: want %+v:\n%s", values, want, out)
		}
	}
}

// TestOddValues renders invalid and unusual values. An invalid value must be refused with a message
// that names the fix. An unusual but valid value must work.
func TestOddValues(t *testing.T) {
	t.Parallel()
	for values, want := range map[string]string{
		"{image: {repository: 'registry.example.com/chandler:1.0'}}":                                                    "give the tag as image.tag",
		"{image: {repository: 'registry.example.com:5000/c@sha256:abc'}}":                                               "or the digest as image.digest",
		"{image: {repository: 'https://registry.example.com/chandler'}}":                                                "leave out what is before the registry's name",
		"{image: {repository: registry.example.com/chandler/}}":                                                         "is not a valid image name",
		"{image: {repository: 'registry.example.com:5000/team/chandler'}}":                                              "",
		"{image: {repository: null}}":                                                                                   "image.repository is empty: no image is published yet, so build one",
		"{image: {tag: null}}":                                                                                          "image.tag is empty: set the version of your image",
		"{image: {tag: null, digest: 'sha256:ab'}}":                                                                     "",
		"{image: {tag: latest}}":                                                                                        "use a tag for each version",
		"{deviceClasses: {families: [nvidea]}}":                                                                         "deviceClasses.families has nvidea, which is not a family with DeviceClasses: write all, amdgpu, nvidia,",
		"{nodeGroups: [{name: a, nodeSelector: {b: c}}, {name: a, nodeSelector: {b: d}}]}":                              "two groups with the name a",
		"{nodeGroups: [{name: a, nodeSelector: {b: c}, config: {reclaim: [{cel: 'true'}]}}]}":                           "nodeGroups a: config.reclaim does nothing without reclaim.enabled",
		"{nodeGroups: [{name: a, nodeSelector: {b: c}, config: {reclaim: [{cel: 'true'}]}, reclaim: {enabled: true}}]}": "",
		"{image: {tag: 'v1:x'}}":                                                                                        "is not a valid tag",
		"{kubelet: {root: null}}":                                                                                       "kubelet.root is empty",
		"{hostPaths: {cdi: null}}":                                                                                      "hostPaths.cdi is empty",
		"{metrics: {port: null}}":                                                                                       "metrics.port is empty",
		"{log: {format: null}}":                                                                                         "log.format is empty",
		"{config: null}":                                                                                                "leave the key out",
		"{metrics: {port: 8083}}":                                                                                       "webUI.bindAddress and metrics.port have the same port 8083",
		"{metrics: {port: 8443, protected: {enabled: true}}}":                                                           "metrics.protected.port and metrics.port are both 8443",
		"{metrics: {port: 8443}}":                                                                                       "",
		"{webUI: {bindAddress: '0.0.0.0:80800'}}":                                                                       "a port is between 1 and 65535",
		"{webUI: {bindAddress: '::1:8083'}}":                                                                            "write an address and a port",
		"{webUI: {bindAddress: '[::]:9000'}}":                                                                           "",
		"{webUI: {bindAddress: null}, nvidiaDriver: {root: null}}":                                                      "",
		"{config: {reclaim: [{cel: 'true'}]}}":                                                                          "config.reclaim does nothing without reclaim.enabled",
		"{config: {passthrough: [{cel: 'true'}]}}":                                                                      "config.passthrough does nothing without passthrough.enabled",
		"{config: {onDemand: {virtualFunctions: [{cel: 'true'}]}}}":                                                     "config.onDemand.virtualFunctions does nothing without onDemand.enabled",
		"{image: {digest: 'sha256:ab'}, nvml: {enabled: true}}":                                                         "image.hostDigest is empty",
		"{image: {digest: 'sha256:ab', hostDigest: 'sha256:cd'}, nvml: {enabled: true}}":                                "",
		"{image: {digest: 'sha256:ab'}, nvidiaDriver: {root: /}}":                                                       "image.hostDigest is empty",
		"{image: {tag: v0.1.0-nvml}}":                                                                                   "the suffix -nvml was renamed to -host",
		"{config: {onDemand: {partitions: [{cel: 'true'}]}}}":                                                           "config.onDemand.partitions does nothing without nvml.enabled (NVIDIA) or onDemand.enabled (AMD), which runs a privileged program beside the agents",
		"{config: {onDemand: {partitions: [{cel: 'true'}]}}, onDemand: {enabled: true}}":                                "",
		"{config: {onDemand: {mps: [{cel: 'true'}]}}}":                                                                  "config.onDemand.mps does nothing without sharingDaemons.enabled, which runs a privileged program beside the agents",
		"{config: {onDemand: {timeSlices: [{cel: 'true'}]}}}":                                                           "config.onDemand.timeSlices does nothing without sharingDaemons.enabled",
		"{config: {onDemand: {mps: [{cel: 'true'}]}}, sharingDaemons: {enabled: true}}":                                 "",
		"{sharingDaemons: {driverRoot: null}}":                                                                          "sharingDaemons.driverRoot is empty",
		"{config: {reclaim: [{cel: 'true'}]}, reclaim: {enabled: true}}":                                                "",
		"{config: {driverRoots: {nvidia: /a}}, nvidiaDriver: {root: /b}}":                                               "config.driverRoots.nvidia is /a and nvidiaDriver.root is /b",
		"{config: {driverRoots: {nvidia: /a}}, nvidiaDriver: {root: /a}}":                                               "",
		"{config: {driverRoots: {nvidia-mps: /a}}, mps: {enabled: true}, extraVolumeMounts: [{name: a, mountPath: /host/a}]}": "",
		"{config: {driverRoots: {nvidia-mps: /a}}, mps: {enabled: true}}":                                                     "config.driverRoots.nvidia-mps is /a and mps.directory is /run/nvidia/mps",
		"{config: {driverRoots: {fpga-intel: /a}}, fpgaProgramming: {enabled: true}}":                                         "config.driverRoots.fpga-intel is /a and fpgaProgramming.bitstreams is",
	} {
		out, err := render(t, values)
		switch {
		case want == "" && err != nil:
			t.Errorf("%s: %s", values, out)
		case want != "" && (err == nil || !strings.Contains(out, want)):
			t.Errorf("%s: %v, no %q in %.300s", values, err, want, out)
		}
	}
	if out := mustRender(t, "{nvidiaDriver: {root: null}}"); strings.Contains(out, "v0.1.0-host") {
		t.Error("without a driver's root the image is that with chandler-host")
	}
}

// The agent runs from its own image, whatever else runs from the image with chandler-host.
func TestImages(t *testing.T) {
	const agent, host = "registry.example.com/chandler:v0.1.0", "registry.example.com/chandler:v0.1.0-host"
	for values, want := range map[string][]string{
		"{}":                                {agent},
		"{nvml: {enabled: true}}":           {agent, host},
		"{passthrough: {enabled: true}}":    {agent, host},
		"{sharingDaemons: {enabled: true}}": {agent, host},
		"{reclaim: {enabled: true}, image: {tag: v0.1.0-host}}":                                                   {agent, host},
		"{nvidiaDriver: {root: /}}":                                                                               {agent, host},
		"{nvml: {enabled: true}, image: {digest: 'sha256:ab', hostDigest: 'sha256:cd'}}":                          {"registry.example.com/chandler@sha256:ab", "registry.example.com/chandler@sha256:cd"},
		"{nvml: {enabled: true}, nvidiaDriver: {root: /}, image: {digest: 'sha256:ab', hostDigest: 'sha256:cd'}}": {"registry.example.com/chandler@sha256:ab", "registry.example.com/chandler@sha256:cd"},
	} {
		out := mustRender(t, values)
		var got []string
		for _, line := range regexp.MustCompile(`(?m)^ +image: (\S+)$`).FindAllStringSubmatch(out, -1) {
			got = append(got, line[1])
		}
		slices.Sort(got)
		if got = slices.Compact(got); !slices.Equal(got, want) {
			t.Errorf("%s: images %q, want %q", values, got, want)
		}
		set := &appsv1.DaemonSet{}
		decode(t, mustRender(t, values, "--show-only=templates/daemonset.yaml"), set)
		if image := set.Spec.Template.Spec.Containers[0].Image; image != want[0] {
			t.Errorf("%s: the agent's image is %s", values, image)
		}
	}
}
