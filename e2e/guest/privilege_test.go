package guest_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"

	"chandler.dev/e2e/guest"
)

// leastPrivilege has the agent's user, capabilities and mounts of the host, as the DaemonSet says them, find the same
// devices as root does.
func leastPrivilege(t *testing.T, g *guest.Guest, want discovered) {
	data, err := os.ReadFile("../../deployments/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var agent appsv1.DaemonSet
	if err := yaml.UnmarshalStrict(data, &agent); err != nil {
		t.Fatal(err)
	}
	pod := agent.Spec.Template.Spec
	container := pod.Containers[0]
	security := container.SecurityContext
	if drop := security.Capabilities.Drop; len(drop) != 1 || drop[0] != "ALL" || len(security.Capabilities.Add) > 0 || *pod.SecurityContext.RunAsUser != 0 || *security.AllowPrivilegeEscalation {
		t.Fatalf("the DaemonSet runs the agent otherwise than this test does: %+v", security)
	}

	var mounts strings.Builder
	for _, volume := range pod.Volumes {
		for _, mount := range container.VolumeMounts {
			if mount.Name != volume.Name || !strings.HasPrefix(mount.MountPath, "/host/") {
				continue
			}
			if !mount.ReadOnly {
				t.Errorf("%s is mounted to be written", mount.MountPath)
			}
			// As containerd does: of the mount point alone, not of what is mounted below it.
			mounts.WriteString("mkdir -p " + mount.MountPath + "; mount --rbind " + volume.HostPath.Path + " " + mount.MountPath + "; mount -o remount,ro,bind " + mount.MountPath + "\n")
		}
	}
	script := mounts.String() + `exec setpriv --reuid 0 --regid 0 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all --ambient-caps=-all chandler discover --host-root /host -o json`
	// A PID namespace and a network of its own, as a pod has.
	r := g.Run(t, "unshare", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--propagation", "private", "sh", "-euc", script)
	if r.Code != 0 {
		t.Fatalf("exit status %d: %s", r.Code, r.Stderr)
	}
	if !slices.Contains(container.Args, "--host-root=/host") {
		t.Errorf("the DaemonSet's agent has the host elsewhere: %s", container.Args)
	}
	if diff := cmp.Diff(want, parse(t, r.Stdout)); diff != "" {
		t.Errorf("found without privilege (-root +agent):\n%s\nstandard error: %s", diff, r.Stderr)
	}
}
