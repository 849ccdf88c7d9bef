package main

import (
	"encoding/json"
	"os"
	"reflect"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"sigs.k8s.io/yaml"
)

// The DaemonSet's patch for NVML adds what is necessary, and removes only the limits that it must
// remove.
func TestNVMLPatch(t *testing.T) {
	read := func(file string) []byte {
		data, err := os.ReadFile("../../deployments/" + file)
		if err != nil {
			t.Fatal(err)
		}
		if data, err = yaml.YAMLToJSON(data); err != nil {
			t.Fatal(err)
		}
		return data
	}
	decode := func(data []byte) corev1.PodSpec {
		var set appsv1.DaemonSet
		if err := json.Unmarshal(data, &set); err != nil {
			t.Fatal(err)
		}
		return set.Spec.Template.Spec
	}
	before := read("daemonset.yaml")
	after, err := strategicpatch.StrategicMergePatch(before, read("examples/nvml-patch.yaml"), appsv1.DaemonSet{})
	if err != nil {
		t.Fatal(err)
	}
	old, patched := decode(before), decode(after)
	if len(patched.Containers) != 1 {
		t.Fatalf("containers %+v", patched.Containers)
	}
	container := patched.Containers[0]
	limits := container.SecurityContext
	if !*limits.Privileged || limits.AllowPrivilegeEscalation != nil || limits.Capabilities != nil || !*limits.ReadOnlyRootFilesystem {
		t.Errorf("security context %+v", limits)
	}
	for _, mount := range old.Containers[0].VolumeMounts {
		if !slices.ContainsFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool { return reflect.DeepEqual(m, mount) }) {
			t.Errorf("lacks %+v", mount)
		}
	}
	for _, mount := range container.VolumeMounts {
		if !slices.ContainsFunc(patched.Volumes, func(v corev1.Volume) bool { return v.Name == mount.Name }) {
			t.Errorf("mounts %s, which is no volume", mount.Name)
		}
	}
	for _, path := range []string{"/dev", "/host/usr"} {
		if !slices.ContainsFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == path }) {
			t.Errorf("nothing is mounted at %s", path)
		}
	}
	if !slices.Equal(old.Containers[0].Args, container.Args) {
		t.Errorf("args %q", container.Args)
	}
}

// The DaemonSet's agent writes node labels to the directory that Node Feature Discovery reads.
func TestFeatureDirIsMounted(t *testing.T) {
	data, err := os.ReadFile("../../deployments/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var set appsv1.DaemonSet
	if err := yaml.UnmarshalStrict(data, &set); err != nil {
		t.Fatal(err)
	}
	pod := set.Spec.Template.Spec
	i := slices.IndexFunc(pod.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == featureDir && !m.ReadOnly })
	if i < 0 {
		t.Fatalf("%s is not mounted, or cannot be written", featureDir)
	}
	name := pod.Containers[0].VolumeMounts[i].Name
	if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool {
		return v.Name == name && v.HostPath != nil && v.HostPath.Path == featureDir
	}) {
		t.Errorf("volume %s is not the host's %s", name, featureDir)
	}
}
