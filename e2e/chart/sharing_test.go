package chart

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// TestSharingDaemons expects the supervisor of MPS daemons only where it is enabled. It runs in a separate
// DaemonSet that an upgrade does not restart, and propagates its mounts to the host, to the
// directory in which agents expect them.
func TestSharingDaemons(t *testing.T) {
	if out, err := render(t, "", "--show-only=templates/sharing-daemons.yaml"); err == nil {
		t.Errorf("it is there by default:\n%s", out)
	}
	values := "sharingDaemons: {enabled: true, driverRoot: /run/nvidia/driver}\nkubelet: {root: /data/kubelet}\nnodeSelector: {a: b}"
	set := &appsv1.DaemonSet{}
	decode(t, mustRender(t, values, "--show-only=templates/sharing-daemons.yaml"), set)
	pod := set.Spec.Template.Spec
	program := pod.Containers[0]
	const dir = "/data/kubelet/plugins/chandler.dev/sharing-daemons/nvidia"
	if set.Spec.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType || !pod.HostPID || *pod.AutomountServiceAccountToken || pod.NodeSelector["a"] != "b" {
		t.Errorf("%+v", set.Spec)
	}
	if !strings.HasSuffix(program.Image, "-host") || !slices.Equal(program.Args, []string{"--sharing-daemons=" + dir, "--driver-root=/driver-root"}) {
		t.Errorf("image %s, args %q", program.Image, program.Args)
	}
	if mount := program.VolumeMounts[0]; mount.MountPath != dir || *mount.MountPropagation != corev1.MountPropagationBidirectional || pod.Volumes[0].HostPath.Path != dir {
		t.Errorf("%+v, %+v", mount, pod.Volumes[0].HostPath)
	}
	if got := pod.Volumes[1].HostPath.Path; got != "/run/nvidia/driver" {
		t.Errorf("driver root %s", got)
	}
	agent := daemonSet(t, values).Spec.Template.Spec
	if agent.Containers[0].SecurityContext.Privileged != nil || agent.HostPID {
		t.Error("the agent is privileged too")
	}
}
