package chart

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"sigs.k8s.io/yaml"

	"chandler.dev/api/v1alpha1"
)

// rendered returns the chart's objects of one kind for values, by name.
func rendered[T any](t *testing.T, template, values string) map[string]*T {
	t.Helper()
	all := make(map[string]*T)
	out := mustRender(t, values, "--show-only=templates/"+template)
	for document := range strings.SplitSeq(out, "\n---\n") {
		var meta metav1.PartialObjectMetadata
		if err := yaml.Unmarshal([]byte(document), &meta); err != nil {
			t.Fatal(err)
		}
		object := new(T)
		decode(t, document, object)
		all[meta.Name] = object
	}
	return all
}

// runsOn returns the names of the DaemonSets, sorted, whose pods run on a node with the labels.
func runsOn(t *testing.T, sets map[string]*appsv1.DaemonSet, nodeLabels map[string]string) (names []string) {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: nodeLabels}}
	for name, set := range sets {
		fits, err := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: set.Spec.Template.Spec}).Match(node)
		if err != nil {
			t.Fatal(err)
		}
		if fits {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

const groupValues = `
nodeSelector: {accelerators: "true"}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
      - matchExpressions: [{key: zone, operator: In, values: [a]}]
      - matchFields: [{key: metadata.name, operator: In, values: [node]}]
config: {mode: DRA, exclude: [{cel: "true"}]}
onDemand: {enabled: true}
nodeGroups:
- name: gpus
  nodeSelector: {pool: gpu, size: large}
  nvml: {enabled: true}
  onDemand: {enabled: false}
  config: {mode: DevicePlugin}
- name: pools
  nodeSelector: {pool: gpu}
  tolerations: []
  sharingDaemons: {enabled: true}
`

// TestNodeGroups renders groups of nodes. Each node must have exactly one agent, with the settings
// of its group, except a node that is left alone.
func TestNodeGroups(t *testing.T) {
	sets := rendered[appsv1.DaemonSet](t, "daemonset.yaml", groupValues)
	for _, test := range []struct {
		labels map[string]string
		want   string
	}{
		{map[string]string{"accelerators": "true"}, "chandler"},
		{map[string]string{"accelerators": "true", "size": "large"}, "chandler"},
		{map[string]string{"accelerators": "true", "pool": "gpu", "size": "large"}, "chandler-gpus"},
		{map[string]string{"pool": "gpu", "size": "large"}, "chandler-gpus"},
		{map[string]string{"pool": "gpu", "size": "small"}, "chandler-pools"},
		{map[string]string{"pool": "cpu"}, ""},
		{map[string]string{"accelerators": "true", "chandler.dev/agent": "off"}, ""},
		{map[string]string{"pool": "gpu", "chandler.dev/agent": "off"}, ""},
		{map[string]string{"pool": "gpu", "size": "large", "chandler.dev/agent": "on"}, "chandler-gpus"},
	} {
		if got := strings.Join(runsOn(t, sets, test.labels), " "); got != test.want {
			t.Errorf("on a node with %v run %q, want %q", test.labels, got, test.want)
		}
	}
	for name, set := range sets {
		for other, o := range sets {
			selector, err := metav1.LabelSelectorAsSelector(set.Spec.Selector)
			if err != nil {
				t.Fatal(err)
			}
			if selector.Matches(labels.Set(o.Spec.Template.Labels)) != (name == other) {
				t.Errorf("the selector of %s and the pods of %s", name, other)
			}
		}
		pod := set.Spec.Template.Spec
		if of := pod.Volumes[0].ConfigMap; of == nil || of.Name != name {
			t.Errorf("%s has the configuration %v", name, of)
		}
	}
	if sets["chandler-pools"].Spec.Template.Spec.Tolerations != nil || sets["chandler"].Spec.Template.Spec.Tolerations == nil {
		t.Error("the tolerations are not those of the groups")
	}
	for name, mode := range map[string]v1alpha1.Mode{"chandler": v1alpha1.ModeDRA, "chandler-gpus": v1alpha1.ModeDevicePlugin, "chandler-pools": v1alpha1.ModeDRA} {
		data := rendered[corev1.ConfigMap](t, "config.yaml", groupValues)[name].Data["config.yaml"]
		config, err := v1alpha1.ParseDriverConfig([]byte(data))
		if err != nil || config.Mode != mode || len(config.Exclude) != 1 {
			t.Errorf("%s: %v\n%s", name, err, data)
		}
	}
	services := rendered[appsv1.DaemonSet](t, "host-service.yaml", groupValues+"networkPolicy: {enabled: false}")
	for name, onDemand := range map[string]bool{"chandler-host": true, "chandler-host-gpus": false, "chandler-host-pools": true} {
		if services[name] == nil {
			t.Fatalf("host services: %q", slices.Sorted(maps.Keys(services)))
		}
		if pod := services[name].Spec.Template.Spec; pod.HostPID != onDemand || slices.Contains(pod.Containers[0].Args, "--serve-nvml") == onDemand {
			t.Errorf("%s: hostPID %t, args %q", name, pod.HostPID, pod.Containers[0].Args)
		}
	}
	if got := runsOn(t, services, map[string]string{"pool": "gpu", "size": "large"}); !slices.Equal(got, []string{"chandler-host-gpus"}) {
		t.Errorf("host services on the node of a group: %q", got)
	}
	daemons := rendered[appsv1.DaemonSet](t, "sharing-daemons.yaml", groupValues)
	if got := slices.Sorted(maps.Keys(daemons)); !slices.Equal(got, []string{"chandler-sharing-daemons-pools"}) {
		t.Errorf("sharing daemons: %q", got)
	}
	if got := runsOn(t, daemons, map[string]string{"pool": "gpu", "size": "large"}); got != nil {
		t.Errorf("sharing daemons of another group: %q", got)
	}
}

// TestStandardLabels expects the recommended labels on every object of the chart.
func TestStandardLabels(t *testing.T) {
	values := "sharingDaemons: {enabled: true}\nmetrics: {podMonitor: {enabled: true, labels: {release: x}}, protected: {enabled: true}}\nnamespace: {create: true}\ndeviceClasses: {families: [all]}"
	count := 0
	for _, document := range separator.Split("\n"+mustRender(t, values), -1)[1:] {
		for part := range strings.SplitSeq(document, "\n---\n") {
			var meta metav1.PartialObjectMetadata
			if err := yaml.Unmarshal([]byte(part), &meta); err != nil {
				t.Fatal(err)
			}
			count++
			got := maps.Clone(meta.Labels)
			name := got["app.kubernetes.io/name"]
			maps.DeleteFunc(got, func(key, _ string) bool {
				return key == "app.kubernetes.io/name" || key == "release" || strings.HasPrefix(key, "pod-security")
			})
			want := map[string]string{
				"helm.sh/chart": "chandler-0.1.0", "app.kubernetes.io/instance": "chandler", "app.kubernetes.io/version": "v0.1.0",
				"app.kubernetes.io/managed-by": "Helm",
			}
			if !strings.HasPrefix(name, "chandler") || !maps.Equal(got, want) {
				t.Errorf("%s %s has the labels %v", meta.Kind, meta.Name, meta.Labels)
			}
		}
	}
	if count < 90 {
		t.Errorf("%d objects", count)
	}
}

// TestFamilies expects the DeviceClasses of kinds, and of the families in the values.
func TestFamilies(t *testing.T) {
	for values, want := range map[string]string{
		"":                                      "amdgpu fpga gpu kvm npu nvidia nvidia-imex nvidia-mig nvidia-mig-1g.10gb sev tun vhost-net vhost-vsock virtualization",
		"deviceClasses: {families: []}":         "fpga gpu npu virtualization",
		"deviceClasses: {families: [dlb, npu]}": "dlb-pf dlb-vf fpga gpu intel-npu npu qualcomm-qaic virtualization",
	} {
		var names []string
		for name := range rendered[struct {
			metav1.TypeMeta   `json:",inline"`
			metav1.ObjectMeta `json:"metadata"`
			Spec              any `json:"spec"`
		}](t, "deviceclasses.yaml", values) {
			names = append(names, strings.TrimSuffix(name, ".chandler.dev"))
		}
		slices.Sort(names)
		if got := strings.Join(names, " "); got != want {
			t.Errorf("%s: classes %s, want %s", values, got, want)
		}
	}
}

// TestUpgradeRestarts expects a change of a field that needs a restart to change the pods, so that an
// upgrade restarts the agents, and a change of another field not to.
func TestUpgradeRestarts(t *testing.T) {
	template := func(config string) *corev1.PodTemplateSpec {
		set := daemonSet(t, "onDemand: {enabled: true}\npassthrough: {enabled: true}\nconfig:\n  "+config)
		return &set.Spec.Template
	}
	const restart = "chandler.dev/restart-checksum"
	before := template("mode: Auto")
	for config, restarts := range map[string]bool{
		"mode: DRA":                                        false,
		"exclude: [{cel: 'true'}]":                         false,
		"onDemand: {keepSeconds: 9}":                       false,
		"resources: [{name: a/b, cel: 'true'}]":            false,
		"resources: [{name: a/b, cel: 'true', sriov: {}}]": true,
		"driverRoots: {nvidia: /a}":                        true,
		"hooks: None":                                      true,
		"paths: [{name: a/b}]":                             true,
		"passthrough: [{cel: 'true'}]":                     true,
		"onDemand: {virtualFunctions: [{cel: 'true'}]}":    true,
	} {
		if after := template(config); (before.Annotations[restart] != after.Annotations[restart]) != restarts {
			t.Errorf("%s: the annotation was %q and is %q", config, before.Annotations[restart], after.Annotations[restart])
		}
	}
	if one, other := template("driverRoots: {nvidia: /a}"), template("driverRoots: {nvidia: /b}"); one.Annotations[restart] == other.Annotations[restart] {
		t.Error("another driver root is no change")
	}
}

// TestReportOnly renders the mode ReportOnly, which the agents' configuration accepts, and expects the
// notes to mention it in place of the warning.
func TestReportOnly(t *testing.T) {
	const values = "config: {mode: ReportOnly}"
	if got := config(t, values).Mode; got != v1alpha1.ModeReportOnly {
		t.Errorf("the mode is %s", got)
	}
	if out := notes(t, values); !strings.Contains(out, "The mode is ReportOnly") || strings.Contains(out, "WARNING") {
		t.Errorf("the notes are\n%s", out)
	}
}

// reference matches a page in Helm's notes, with its section if it has one.
var reference = regexp.MustCompile(`docs/[a-z/-]+\.md(?:#[a-z-]+)?`)

// TestNotesOfPages expects the pages and sections that Helm's notes mention to exist, and the notes
// to warn about other plugins. No command may print an object of every node.
func TestNotesOfPages(t *testing.T) {
	out := notes(t, `
nvml: {enabled: true}
fpgaProgramming: {enabled: true}
passthrough: {enabled: true}
reclaim: {enabled: true}
onDemand: {enabled: true}
sharingDaemons: {enabled: true}
nodeGroups: [{name: gpus, nodeSelector: {a: b}}]`)
	found := reference.FindAllString(out, -1)
	if len(found) < 3 {
		t.Errorf("the notes mention %q", found)
	}
	for _, at := range found {
		file, section, _ := strings.Cut(at, "#")
		page, err := os.ReadFile(filepath.Join("../..", file))
		if err != nil {
			t.Error(err)
			continue
		}
		heading := regexp.MustCompile(`(?im)^#+ ` + strings.ReplaceAll(regexp.QuoteMeta(section), "-", "[- ]"))
		if section != "" && !heading.Match(page) {
			t.Errorf("%s has no section %s", file, section)
		}
	}
	for _, want := range []string{"WARNING: Each node offers all of its devices", "nvidia.com/gpu", "rollout status daemonset/chandler-gpus"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "  kubectl get") && !strings.Contains(line, "deviceclasses -l") {
			t.Errorf("a command prints objects of every node: %s", line)
		}
	}
}
