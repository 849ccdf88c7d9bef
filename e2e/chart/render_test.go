// Package chart tests the Helm chart with the real Helm: the rendered manifests, and installation,
// upgrade, rollback and removal on a cluster.
package chart

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/api/resource/v1beta1"
	"k8s.io/api/resource/v1beta2"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"sigs.k8s.io/yaml"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/e2e/build"
)

var update = flag.Bool("update", false, "write the plain manifests and the schema anew")

const (
	deployments = "../../deployments"
	chartDir    = deployments + "/helm/chandler"
)

// manifests are the files of deployments/ that the chart renders from templates of the same name.
var manifests = []string{
	"namespace.yaml", "rbac.yaml", "config.yaml", "daemonset.yaml", "deviceclasses.yaml", "admission.yaml", "admission-slices.yaml",
	"admission-claims.yaml", "admission-events.yaml", "admission-pods.yaml", "network-policy.yaml", "examples/uninstall.yaml",
}

// special are files that the chart renders from a template with other than its default values.
var special = map[string]struct{ template, values string }{
	"prometheus/podmonitor.yaml":           {"podmonitor.yaml", "metrics: {podMonitor: {enabled: true}}"},
	"prometheus/podmonitor-protected.yaml": {"podmonitor.yaml", "metrics: {podMonitor: {enabled: true}, protected: {enabled: true}}"},
	"examples/deviceclasses-all.yaml":      {"deviceclasses.yaml", "deviceClasses: {families: [all]}"},
	"examples/host-service.yaml":           {"host-service.yaml", hostServiceValues},
}

// hostServiceValues are the values of the plain manifest of the host service.
const hostServiceValues = `
nvml: {enabled: true}
passthrough: {enabled: true}
reclaim: {enabled: true}
onDemand: {enabled: true}
`

// imageValues are the values that every installation needs.
const imageValues = "image: {repository: registry.example.com/chandler, tag: v0.1.0}"

// helm builds Helm once and returns the path of the program.
var helm = sync.OnceValues(func() (string, error) { return build.Builder{Progress: os.Stderr}.Helm(context.Background()) })

// releaseLabels matches the labels that describe Helm's release. The plain manifests do not have
// them, because Helm does not manage their objects.
var releaseLabels = regexp.MustCompile(`(?m)^ +(?:helm\.sh/chart|app\.kubernetes\.io/(?:instance|version|managed-by)): .*\n`)

// render returns the chart's manifests for values, in addition to imageValues.
func render(t *testing.T, values string, args ...string) (string, error) {
	t.Helper()
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	arguments := []string{"template", "chandler", chartDir, "--namespace=chandler"}
	for name, content := range map[string]string{"image.yaml": imageValues, "values.yaml": values} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	arguments = append(arguments, "--values="+filepath.Join(dir, "image.yaml"), "--values="+filepath.Join(dir, "values.yaml"))
	cmd := exec.CommandContext(t.Context(), program, append(arguments, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	return string(out) + stderr.String(), err
}

func mustRender(t *testing.T, values string, args ...string) string {
	t.Helper()
	out, err := render(t, values, args...)
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, out)
	}
	return out
}

// separator matches Helm's separator of documents.
var separator = regexp.MustCompile(`\n*---\n# Source: .*\n`)

// TestManifests compares the plain manifests byte by byte with the output of the chart, without the
// labels of a release.
func TestManifests(t *testing.T) {
	for _, name := range slices.Concat(manifests, slices.Sorted(maps.Keys(special))) {
		t.Run(name, func(t *testing.T) {
			values, template := "namespace: {create: true}", filepath.Base(name)
			if s, is := special[name]; is {
				values, template = s.values, s.template
			}
			out := mustRender(t, values, "--show-only=templates/"+template)
			documents := separator.Split("\n"+out, -1)[1:]
			got := releaseLabels.ReplaceAllString(strings.TrimSpace(strings.Join(documents, "\n---\n"))+"\n", "")
			file := filepath.Join(deployments, name)
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("it is not what the chart renders; change the chart, and run make manifests (-file +chart):\n%s", diff)
			}
		})
	}
}

// daemonSet returns the chart's DaemonSet for values.
func daemonSet(t *testing.T, values string) *appsv1.DaemonSet {
	t.Helper()
	set := &appsv1.DaemonSet{}
	decode(t, mustRender(t, values, "--show-only=templates/daemonset.yaml"), set)
	return set
}

func decode(t *testing.T, text string, into any) {
	t.Helper()
	if err := yaml.UnmarshalStrict([]byte(text), into); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
}

// TestPatches applies each example patch to the plain DaemonSet. The result must equal the chart's
// DaemonSet with the corresponding value.
func TestPatches(t *testing.T) {
	for patch, values := range map[string]string{
		"host-service-patch.yaml": hostServiceValues,
		"mps-patch.yaml":          "mps: {enabled: true}",
	} {
		t.Run(patch, func(t *testing.T) {
			plain := readJSON(t, filepath.Join(deployments, "daemonset.yaml"))
			patched, err := strategicpatch.StrategicMergePatch(plain, readJSON(t, filepath.Join(deployments, "examples", patch)), appsv1.DaemonSet{})
			if err != nil {
				t.Fatal(err)
			}
			want := &appsv1.DaemonSet{}
			if err := json.Unmarshal(patched, want); err != nil {
				t.Fatal(err)
			}
			got := daemonSet(t, values)
			if diff := cmp.Diff(byName(want), byName(got)); diff != "" {
				t.Errorf("-patch +chart:\n%s", diff)
			}
		})
	}
}

// byName returns a DaemonSet without volumes and mounts, and these as maps, because their order is
// irrelevant. The labels of a release and the checksum of the configuration are left out.
func byName(set *appsv1.DaemonSet) any {
	set = set.DeepCopy()
	set.Labels = map[string]string{"app.kubernetes.io/name": set.Labels["app.kubernetes.io/name"]}
	set.Spec.Template.Annotations = nil
	pod := &set.Spec.Template.Spec
	volumes, mounts := make(map[string]corev1.Volume), make(map[string]corev1.VolumeMount)
	for _, volume := range pod.Volumes {
		volumes[volume.Name] = volume
	}
	for _, mount := range pod.Containers[0].VolumeMounts {
		mounts[mount.MountPath] = mount
	}
	pod.Volumes, pod.Containers[0].VolumeMounts = nil, nil
	return []any{set, volumes, mounts}
}

func readJSON(t *testing.T, file string) []byte {
	t.Helper()
	data, err := os.ReadFile(file)
	if err == nil {
		data, err = yaml.YAMLToJSON(data)
	}
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// config returns the chart's configuration for values.
func config(t *testing.T, values string) *v1alpha1.DriverConfig {
	t.Helper()
	var manifest corev1.ConfigMap
	decode(t, mustRender(t, values, "--show-only=templates/config.yaml"), &manifest)
	config, err := v1alpha1.ParseDriverConfig([]byte(manifest.Data["config.yaml"]))
	if err != nil {
		t.Fatalf("%v\n%s", err, manifest.Data["config.yaml"])
	}
	return config
}

// TestRoots expects values with host directories to set driver roots in the configuration, unless
// the configuration sets them itself.
func TestRoots(t *testing.T) {
	got := config(t, `
config:
  mode: DRA
  exclude: [{cel: "true", nodes: {names: [a]}}]
  driverRoots: {nvidia-mps: /run/nvidia/mps/mine}
nvml: {enabled: true, root: /run/nvidia/driver}
mps: {enabled: true}
fpgaProgramming: {enabled: true}
`)
	want := map[string]string{"nvidia": "/run/nvidia/driver", "nvidia-mps": "/run/nvidia/mps/mine", "fpga-intel": "/srv/intel.com/fpga"}
	if !reflect.DeepEqual(got.DriverRoots, want) || got.Mode != v1alpha1.ModeDRA || len(got.Exclude) != 1 {
		t.Errorf("got %+v", got)
	}
	if got := config(t, "config: {mode: null}\nnvml: {enabled: true}"); got.DriverRoots != nil || got.Mode != v1alpha1.ModeAuto {
		t.Errorf("got %+v", got)
	}
}

// TestDriverRoot sets the root of NVIDIA's driver. The agent must run unprivileged in its own image,
// with the driver's files mounted, and the host service must find the files in the same root.
func TestDriverRoot(t *testing.T) {
	ofTheHost := []string{"/usr", "/lib/firmware", "/etc/alternatives", "/etc/OpenCL", "/etc/vulkan"}
	for name, test := range map[string]struct {
		values string
		sees   []string
	}{
		"of a container":   {"nvidiaDriver: {root: /run/nvidia/driver}", []string{"/run/nvidia/driver"}},
		"of the host":      {"nvidiaDriver: {root: /}", ofTheHost},
		"with NVML":        {"nvidiaDriver: {root: /}\nnvml: {enabled: true}", ofTheHost},
		"with NVML's root": {"nvidiaDriver: {root: /drv}\nnvml: {enabled: true, root: /opt/nvidia}", []string{"/drv"}},
	} {
		t.Run(name, func(t *testing.T) {
			pod := daemonSet(t, test.values).Spec.Template.Spec
			agent := pod.Containers[0]
			if strings.HasSuffix(agent.Image, "-host") || agent.SecurityContext.Privileged != nil || !slices.Contains(agent.Args, hostServiceDir) {
				t.Errorf("image %s, privileged %v", agent.Image, agent.SecurityContext.Privileged)
			}
			directory := make(map[string]string)
			for _, volume := range pod.Volumes {
				if volume.HostPath == nil {
					continue
				}
				directory[volume.Name] = volume.HostPath.Path
				// Hosts without these directories can have a driver too.
				if strings.HasPrefix(volume.Name, "nvml") && strings.HasPrefix(volume.HostPath.Path, "/etc/") && *volume.HostPath.Type != corev1.HostPathDirectoryOrCreate {
					t.Errorf("%s must be there: %s", volume.HostPath.Path, *volume.HostPath.Type)
				}
			}
			var sees []string
			for _, mount := range agent.VolumeMounts {
				if strings.HasPrefix(mount.Name, "nvml") && mount.ReadOnly && mount.MountPath == "/host"+directory[mount.Name] {
					sees = append(sees, directory[mount.Name])
				}
			}
			root, _, _ := strings.Cut(strings.TrimPrefix(test.values, "nvidiaDriver: {root: "), "}")
			if got := config(t, test.values); !slices.Equal(sees, test.sees) || got.DriverRoots["nvidia"] != root {
				t.Errorf("it sees %v; roots %v", sees, got.DriverRoots)
			}
		})
	}
}

// TestValues changes many values and checks their effects.
func TestValues(t *testing.T) {
	set := daemonSet(t, `
image: {digest: "sha256:00", repository: example.com/a}
imagePullSecrets: [{name: pull}]
kubelet: {root: /data/kubelet, devicePlugins: /data/plugins}
hostPaths: {sys: /sim/sys, proc: /sim/proc, dev: /sim/dev, cdi: /sim/cdi, networkDevices: /sim/net, features: /sim/features}
nodeSelector: {a: b}
affinity: {nodeAffinity: {}}
priorityClassName: ""
tolerations: []
resources: {requests: null, limits: {memory: 64Mi}}
podAnnotations: {c: d}
podLabels: {e: f}
log: {verbosity: 4, format: json}
metrics: {port: 9000}
extraArgs: [--runtime-root=/sim]
webUI: {bindAddress: ":9001"}
traces: {endpoint: "http://otel.monitoring:4317"}
extraEnv: [{name: G, value: h}]
extraVolumes: [{name: i, emptyDir: {}}]
extraVolumeMounts: [{name: i, mountPath: /i}]
`)
	pod := set.Spec.Template.Spec
	container := pod.Containers[0]
	if container.Image != "example.com/a@sha256:00" || pod.ImagePullSecrets[0].Name != "pull" || pod.PriorityClassName != "" || pod.Tolerations != nil ||
		pod.NodeSelector["a"] != "b" || pod.Affinity == nil || container.Resources.Limits.Memory().String() != "64Mi" || container.Resources.Requests != nil ||
		set.Spec.Template.Annotations["c"] != "d" || set.Spec.Template.Labels["e"] != "f" || set.Spec.Template.Labels["app.kubernetes.io/name"] != "chandler" ||
		container.Ports[0].ContainerPort != 9000 || container.Ports[1].ContainerPort != 9001 ||
		container.Env[len(container.Env)-1].Name != "G" || container.Env[len(container.Env)-2].Value != "http://otel.monitoring:4317" {
		t.Errorf("got %+v", set)
	}
	args := strings.Join(container.Args, " ")
	for _, arg := range []string{
		"--healthz-bind-address=:9000", "--web-ui-bind-address=:9001", "--kubelet-root=/data/kubelet", "--device-plugin-dir=/data/plugins", "-v=4", "--logging-format=json", "--runtime-root=/sim",
	} {
		if !strings.Contains(args, arg) {
			t.Errorf("no %s among %q", arg, container.Args)
		}
	}
	paths := make(map[string]string) // host paths by mount path
	for _, mount := range container.VolumeMounts {
		for _, volume := range pod.Volumes {
			if volume.Name == mount.Name && volume.HostPath != nil {
				paths[mount.MountPath] = volume.HostPath.Path
			}
		}
	}
	want := map[string]string{
		"/host/sys": "/sim/sys", "/host/proc": "/sim/proc", "/host/dev": "/sim/dev", "/var/run/cdi": "/sim/cdi",
		"/var/run/k8s.cni.cncf.io/devinfo/dp": "/sim/net", "/etc/kubernetes/node-feature-discovery/features.d": "/sim/features",
		"/data/kubelet/plugins": "/data/kubelet/plugins", "/data/kubelet/plugins_registry": "/data/kubelet/plugins_registry",
		"/data/kubelet/pod-resources": "/data/kubelet/pod-resources", "/data/plugins": "/data/plugins", "/run/chandler": "/run/chandler",
	}
	if diff := cmp.Diff(want, paths); diff != "" {
		t.Errorf("paths of the host (-want +got):\n%s", diff)
	}
}

// TestLeftOut expects the chart to leave out disabled objects, and objects that the API server does
// not support.
func TestLeftOut(t *testing.T) {
	kinds := func(out string) map[string]int {
		kinds := make(map[string]int)
		for _, document := range separator.Split("\n"+out, -1)[1:] {
			var object struct{ Kind string }
			if err := yaml.Unmarshal([]byte(document), &object); err != nil {
				t.Fatal(err)
			}
			kinds[object.Kind]++
		}
		return kinds
	}
	all := kinds(mustRender(t, ""))
	if all["DeviceClass"] == 0 || all["ValidatingAdmissionPolicy"] < 2 || all["Namespace"] != 0 || all["DaemonSet"] != 1 {
		t.Errorf("by default there are %v", all)
	}
	some := kinds(mustRender(t, "deviceClasses: {enabled: false}\nadmissionPolicies: {parameters: false}"))
	if some["DeviceClass"] != 0 || some["ValidatingAdmissionPolicy"] != all["ValidatingAdmissionPolicy"]-1 {
		t.Errorf("there are %v of %v", some, all)
	}
	old := kinds(mustRender(t, "", "--kube-version=1.29.0"))
	if old["ValidatingAdmissionPolicy"] != 0 || old["DaemonSet"] != 1 {
		t.Errorf("in 1.29 there are %v", old)
	}
}

// TestDeviceClassesOfVersions renders the DeviceClasses for several versions of Kubernetes. Each
// class must be valid in the newest version of resource.k8s.io, which is a beta version before
// 1.34.
func TestDeviceClassesOfVersions(t *testing.T) {
	classes := func(version string, decoded func(document string) (spec any)) (all []string) {
		out := mustRender(t, "deviceClasses: {families: [all]}", "--kube-version="+version, "--show-only=templates/deviceclasses.yaml")
		for _, document := range separator.Split("\n"+out, -1)[1:] {
			spec, err := yaml.Marshal(decoded(document))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, string(spec))
		}
		return all
	}
	var named int
	want := classes("1.34.0", func(document string) any {
		var class resourceapi.DeviceClass
		decode(t, document, &class)
		if class.Spec.ExtendedResourceName != nil {
			named++
		}
		class.Spec.ExtendedResourceName = nil
		return []any{class.APIVersion, class.Name, class.Spec}
	})
	if len(want) < 10 || named == 0 {
		t.Fatalf("%d classes in 1.34, %d with an extended resource", len(want), named)
	}
	for version, decoded := range map[string]func(document string) any{
		"1.33.0-gke.1": func(document string) any {
			var class v1beta2.DeviceClass
			decode(t, document, &class)
			if class.APIVersion != v1beta2.SchemeGroupVersion.String() || class.Spec.ExtendedResourceName != nil {
				t.Errorf("class %s has version %s, resource %v", class.Name, class.APIVersion, class.Spec.ExtendedResourceName)
			}
			return []any{resourceapi.SchemeGroupVersion.String(), class.Name, class.Spec}
		},
		"1.32.5": func(document string) any {
			var class v1beta1.DeviceClass
			decode(t, document, &class)
			if class.APIVersion != v1beta1.SchemeGroupVersion.String() || class.Spec.ExtendedResourceName != nil {
				t.Errorf("class %s has version %s, resource %v", class.Name, class.APIVersion, class.Spec.ExtendedResourceName)
			}
			return []any{resourceapi.SchemeGroupVersion.String(), class.Name, class.Spec}
		},
	} {
		if diff := cmp.Diff(want, classes(version, decoded)); diff != "" {
			t.Errorf("%s (-1.34 +%[1]s):\n%s", version, diff)
		}
	}
	if out, err := render(t, "", "--kube-version=1.31.0", "--show-only=templates/deviceclasses.yaml"); err == nil {
		t.Errorf("in 1.31 there are %s", out)
	}
}

// TestSchemaRefuses expects the schema to refuse misspelt values and to name them.
func TestSchemaRefuses(t *testing.T) {
	for values, want := range map[string]string{
		"image: {tagg: a}":                                                         "tagg",
		"images: {}":                                                               "images",
		"config: {mode: Sometimes}":                                                "mode",
		"config: {sharing: [{cel: a, replica: 2}]}":                                "replica",
		"config: {exclude: [{cel: a, nodes: {name: [a]}}]}":                        "name",
		"metrics: {port: http}":                                                    "port",
		"hostPaths: {dev: dev}":                                                    "dev",
		"webUI: {bindAddress: localhost}":                                          "bindAddress",
		"nodeGroups: [{name: a}]":                                                  "nodeSelector",
		"nodeGroups: [{name: a, nodeSelector: {}}]":                                "nodeSelector",
		"nodeGroups: [{name: a, nodeSelector: {b: c}, metrics: {}}]":               "metrics",
		"nodeGroups: [{name: default, nodeSelector: {b: c}}]":                      "name",
		"nodeGroups: [{name: a, nodeSelector: {b: c}, config: {mode: Sometimes}}]": "mode",
		"config: {resources: [{name: a/b, cel: 'true', mode: ReportOnly}]}":        "mode",
		"maxSurge: 0%":                                                             "maxSurge",
		"traces: {endpoint: 'otel:4317'}":                                          "endpoint",
	} {
		if out, err := render(t, values); err == nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v: %s", values, err, out)
		}
	}
}

// TestRenamedValues expects the chart to refuse previous names of values, and to name the present
// ones.
func TestRenamedValues(t *testing.T) {
	renamed := map[string]string{
		"rebinding": "passthrough", "handover": "reclaim", "onRequest": "onDemand", "upkeep": "sharingDaemons",
		"page": "webUI", "networkPolicy.pageFrom": "networkPolicy.webUIFrom",
	}
	for previous, name := range v1alpha1.Renamed {
		renamed["config."+previous] = "config." + name
	}
	for previous, name := range renamed {
		out, err := render(t, "", "--set="+previous+".a=b")
		if want := "the value " + previous + " was renamed to " + name; err == nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v: %s; want %q", previous, err, out, want)
		}
	}
}

// TestRemovedHostService expects the chart to refuse the previous switch of the host service, and to
// name the values that run it.
func TestRemovedHostService(t *testing.T) {
	out, err := render(t, "", "--set=hostService.enabled=true")
	if err == nil {
		t.Fatal("rendered")
	}
	for _, feature := range []string{"nvml", "passthrough", "onDemand", "reclaim", "fpgaProgramming"} {
		if !strings.Contains(out, "the value hostService was removed:") || !strings.Contains(out, feature+".enabled") {
			t.Errorf("%s is missing: %s", feature, out)
		}
		if doc, err := render(t, "", "--set="+feature+".enabled=true"); err != nil || !strings.Contains(doc, "--host-service=") {
			t.Errorf("%s.enabled runs no host service: %v", feature, err)
		}
	}
}
