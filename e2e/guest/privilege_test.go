package guest_test

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"chandler.dev/e2e/guest"
)

// leastPrivilege checks that the agent's container of the DaemonSet finds the same devices as root.
func leastPrivilege(t *testing.T, g *guest.Guest, want discovered) {
	pod := daemonSet(t)
	if !slices.Contains(pod.Containers[0].Args, "--host-root=/host") {
		t.Errorf("the DaemonSet's agent has the host elsewhere: %s", pod.Containers[0].Args)
	}
	r := g.Run(t, contained(t, g, pod, "discover", "--host-root=/host", "-o", "json")...)
	if r.Code != 0 {
		t.Fatalf("exit status %d: %s", r.Code, r.Stderr)
	}
	if diff := cmp.Diff(want, parse(t, r.Stdout)); diff != "" {
		t.Errorf("found without privilege (-root +agent):\n%s\nstandard error: %s", diff, r.Stderr)
	}
}

// leastPrivilegedAgent checks that an agent in the DaemonSet's container offers the kubelet the
// same devices as an agent of root on the host.
func leastPrivilegedAgent(t *testing.T, g *guest.Guest) {
	const resource = "example.com/any"
	n := newNode(t, g, `apiVersion: chandler.dev/v1alpha1
kind: DriverConfig
mode: DevicePlugin
resources: [{name: `+resource+`, cel: "true"}]
`)
	// The API server is unreachable from a separate network namespace, and lists do not need it.
	g.WriteFile(t, "/etc/chandler/kubeconfig", kubeconfig, 0o600)
	offers := func(args ...string) (last string) {
		n.step()
		agent := g.Start(t, args...)
		for began, since := time.Now(), time.Now(); last == "" || time.Since(since) < 15*time.Second; time.Sleep(200 * time.Millisecond) {
			lines := regexp.MustCompile(`(?m)^list `+resource+` \d+ (.*)\n`).FindAllStringSubmatch(n.kubelet.Output()[n.since:], -1)
			if len(lines) > 0 && lines[len(lines)-1][1] != last {
				last, since = lines[len(lines)-1][1], time.Now()
			}
			if time.Since(began) > 2*time.Minute {
				t.Fatalf("offered are %q, and the agent said:\n%s", last, agent.Output())
			}
		}
		agent.Stop(t)
		return last
	}
	pod := daemonSet(t)
	args := append(slices.Clone(pod.Containers[0].Args), "--kubeconfig=/etc/chandler/kubeconfig", "--web-ui-bind-address=")
	contained := offers(contained(t, g, pod, args...)...)
	root := offers("chandler", "run", "--kubeconfig=/etc/chandler/kubeconfig", "--config=/etc/chandler/config.yaml",
		"--node-name=node", "--pod-uid=uid", "--pod=default/agent", "--web-ui-bind-address=")
	if diff := cmp.Diff(root, contained); diff != "" || strings.Count(root, "=Healthy") < 6 {
		t.Errorf("offered without privilege (-root +agent):\n%s\nroot's agent offers %s", diff, root)
	}
}

// daemonSet returns the agent's pod.
func daemonSet(t *testing.T) corev1.PodSpec {
	t.Helper()
	data, err := os.ReadFile("../../deployments/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var agent appsv1.DaemonSet
	if err := yaml.UnmarshalStrict(data, &agent); err != nil {
		t.Fatal(err)
	}
	return agent.Spec.Template.Spec
}

// contained creates the agent's container with other arguments, and returns the command to run it:
// with separate namespaces, the pod's user, capabilities, read-only root and mounts, and the
// seccomp profile of containerd for RuntimeDefault.
func contained(t *testing.T, g *guest.Guest, pod corev1.PodSpec, args ...string) []string {
	t.Helper()
	const dir = "/agent" // on the file system of the program
	g.Sh(t, "rm -rf "+dir+"; mkdir -p "+dir+"/rootfs; ln /usr/bin/chandler "+dir+"/rootfs/chandler; cd "+dir+"; runc spec")
	var spec specs.Spec
	if err := json.Unmarshal([]byte(g.ReadFile(t, dir+"/config.json")), &spec); err != nil {
		t.Fatal(err)
	}
	container := pod.Containers[0]
	security := container.SecurityContext
	if drop := security.Capabilities.Drop; len(drop) != 1 || drop[0] != "ALL" || len(security.Capabilities.Add) > 0 || pod.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Fatalf("the DaemonSet runs the agent otherwise than this test does: %+v", security)
	}
	spec.Root.Readonly = *security.ReadOnlyRootFilesystem
	spec.Process.Terminal = false
	spec.Process.Args = append([]string{"/chandler"}, args...)
	spec.Process.Env = []string{"NODE_NAME=node", "POD_UID=uid", "POD=default/agent"}
	spec.Process.User.UID = uint32(*pod.SecurityContext.RunAsUser) //nolint:gosec // 0
	spec.Process.Capabilities = &specs.LinuxCapabilities{}
	spec.Process.NoNewPrivileges = !*security.AllowPrivilegeEscalation
	spec.Linux.Seccomp = seccomp.DefaultProfile(&spec)
	if pod.HostNetwork {
		spec.Linux.Namespaces = slices.DeleteFunc(spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.NetworkNamespace })
	}
	for _, volume := range pod.Volumes {
		source := "/etc/chandler" // the ConfigMap
		if volume.HostPath != nil {
			source = volume.HostPath.Path
		}
		g.Sh(t, "mkdir -p "+source)
		for _, mount := range container.VolumeMounts {
			if mount.Name != volume.Name {
				continue
			}
			if strings.HasPrefix(mount.MountPath, "/host/") && !mount.ReadOnly {
				t.Errorf("%s is mounted to be written", mount.MountPath)
			}
			// As in containerd, only the mount itself is read-only, not the mounts below.
			options := []string{"rbind", "rprivate", map[bool]string{true: "ro", false: "rw"}[mount.ReadOnly]}
			spec.Mounts = append(spec.Mounts, specs.Mount{Destination: mount.MountPath, Type: "bind", Source: source, Options: options})
		}
	}
	data, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	g.WriteFile(t, dir+"/config.json", string(data), 0o644)
	containers++
	return []string{"runc", "run", "--no-pivot", "--bundle", dir, "agent" + strconv.Itoa(containers)}
}

// containers is the number of created containers.
var containers int
