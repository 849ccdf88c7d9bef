package main

import (
	"os"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

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
