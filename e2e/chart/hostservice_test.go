package chart

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	networkingv1 "k8s.io/api/networking/v1"
)

// TestHostService expects a privileged pod without token and network beside an unprivileged agent. It may
// write only the attributes of the enabled features.
func TestHostService(t *testing.T) {
	for values, attributes := range map[string]string{
		"passthrough: {enabled: true}": "bind,driver_override,drivers_probe,unbind",
		"reclaim: {enabled: true}":     "reset,reset_method",
		"onDemand: {enabled: true}":    "bind,driver_override,drivers_probe,unbind,current_compute_partition,sriov_numvfs",
	} {
		if out, err := render(t, values, "--show-only=templates/host-service.yaml"); err == nil {
			t.Errorf("%s: the service is there by default:\n%s", values, out)
		}
		values += "\nhostService: {enabled: true}\nnodeSelector: {a: b}\nhostPaths: {run: /run/other}"
		objects := separator.Split(mustRender(t, values, "--show-only=templates/host-service.yaml"), -1)[1:]
		if len(objects) != 2 {
			t.Fatalf("%s: %q", values, objects)
		}
		set, denied := &appsv1.DaemonSet{}, &networkingv1.NetworkPolicy{}
		decode(t, objects[0], denied) // Helm sorts by kind
		decode(t, objects[1], set)
		pod := set.Spec.Template.Spec
		program := pod.Containers[0]
		if !pod.HostPID || pod.HostNetwork || *pod.AutomountServiceAccountToken || !*program.SecurityContext.Privileged || len(program.Ports) > 0 || pod.NodeSelector["a"] != "b" {
			t.Errorf("%s: %+v", values, pod)
		}
		if want := []string{"--host-root=/host", "--host-service=/run/chandler/host", "--allow=" + attributes}; !strings.HasSuffix(program.Image, "-host") || !slices.Equal(program.Args, want) {
			t.Errorf("%s: image %s, args %q, want %q", values, program.Image, program.Args, want)
		}
		if got := pod.Volumes[len(pod.Volumes)-1].HostPath.Path; got != "/run/other/host" {
			t.Errorf("%s: socket in %s", values, got)
		}
		if s := denied.Spec; len(s.PolicyTypes) != 2 || len(s.Ingress)+len(s.Egress) > 0 || s.PodSelector.MatchLabels["app.kubernetes.io/name"] != set.Spec.Template.Labels["app.kubernetes.io/name"] {
			t.Errorf("%s: policy %+v", values, s)
		}
		agent := daemonSet(t, values).Spec.Template.Spec
		if agent.Containers[0].SecurityContext.Privileged != nil || agent.HostPID || !slices.Contains(agent.Containers[0].Args, "--host-service-dir=/run/chandler/host") {
			t.Errorf("%s: the agent is %+v", values, agent.Containers[0])
		}
		for _, mount := range agent.Containers[0].VolumeMounts {
			if strings.HasPrefix(mount.MountPath, "/host/sys") && !mount.ReadOnly {
				t.Errorf("%s: the agent can write to %s", values, mount.MountPath)
			}
		}
	}
	if out, err := render(t, "hostService: {enabled: true}", "--show-only=templates/host-service.yaml"); err == nil {
		t.Errorf("the service runs without a feature that needs it:\n%s", out)
	}
}
