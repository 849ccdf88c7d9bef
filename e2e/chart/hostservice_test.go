package chart

import (
	"maps"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
)

// TestHostServiceNVML expects the host service to have NVML's privilege, device nodes and libraries in
// place of the agent. The agent keeps the directories of a driver root, from which containers get
// files.
func TestHostServiceNVML(t *testing.T) {
	const usr, root = "/host/usr", "/host/run/nvidia/driver"
	for values, c := range map[string]struct {
		args                   []string
		service, agent, hidden []string // mounts, and paths that are not mounted into the agent
		hostPID                bool
	}{
		"nvml: {enabled: true}":                                                                      {[]string{"--driver-root=/"}, []string{"/dev", usr}, nil, []string{"/dev", usr}, false},
		"nvml: {enabled: true, root: /run/nvidia/driver}":                                            {[]string{"--driver-root=/run/nvidia/driver"}, []string{"/dev", root}, []string{root}, []string{"/dev"}, false},
		"nvml: {enabled: true}\nnvidiaDriver: {root: /run/nvidia/driver}":                            {[]string{"--driver-root=/run/nvidia/driver"}, []string{"/dev", root}, []string{root}, []string{"/dev", usr}, false},
		"nvml: {enabled: true}\nnvidiaDriver: {root: /}":                                             {[]string{"--driver-root=/"}, []string{"/dev", usr, "/host/etc/OpenCL"}, []string{usr, "/host/etc/OpenCL"}, []string{"/dev"}, false},
		"nvml: {enabled: true}\nreclaim: {enabled: true}":                                            {[]string{"--allow=reset,reset_method", "--driver-root=/"}, []string{"/dev", usr, "/host/sys"}, nil, []string{"/dev", usr}, true},
		"nvml: {enabled: true}\nconfig: {onDemand: {partitions: [{cel: 'true'}]}}":                   {[]string{"--driver-root=/"}, []string{"/dev", usr}, nil, []string{"/dev", usr}, false},
		"nvml: {enabled: true}\nconfig: {driverRoots: {nvidia: /opt/nvidia}}\nextraVolumeMounts: []": {[]string{"--driver-root=/"}, []string{"/dev", usr}, nil, []string{"/dev", usr}, false},
	} {
		set := &appsv1.DaemonSet{}
		values += "\nnetworkPolicy: {enabled: false}"
		decode(t, mustRender(t, values, "--show-only=templates/host-service.yaml"), set)
		service, agent := set.Spec.Template.Spec, daemonSet(t, values).Spec.Template.Spec
		program := service.Containers[0]
		for _, want := range append(c.args, "--serve-nvml", "--gpus=/host/proc/driver/nvidia/gpus", "--host-root=/host") {
			if !slices.Contains(program.Args, want) {
				t.Errorf("%s: args %q, want %s", values, program.Args, want)
			}
		}
		writable := mountsOf(&service)
		if service.HostPID != c.hostPID || writable["/host/sys"] != c.hostPID || slices.ContainsFunc(program.Args, func(arg string) bool { return arg == "--allow=" }) {
			t.Errorf("%s: hostPID %v, /host/sys is writable: %v, args %q", values, service.HostPID, writable["/host/sys"], program.Args)
		}
		for _, path := range c.service {
			if isWritable, isMounted := writable[path]; !isMounted || isWritable != (path == "/dev" || path == "/host/sys") {
				t.Errorf("%s: %s in the service: mounted %v, writable %v", values, path, isMounted, isWritable)
			}
		}
		if !slices.Contains(agent.Containers[0].Args, hostServiceDir) {
			t.Errorf("%s: the agent has args %q", values, agent.Containers[0].Args)
		}
		mounts := mountsOf(&agent)
		for _, path := range c.agent {
			if isWritable, isMounted := mounts[path]; !isMounted || isWritable {
				t.Errorf("%s: %s in the agent: mounted %v, writable %v", values, path, isMounted, isWritable)
			}
		}
		for _, path := range c.hidden {
			if _, isMounted := mounts[path]; isMounted {
				t.Errorf("%s: the agent has %s", values, path)
			}
		}
	}
}

// mountsOf returns the paths of a pod's mounts, each with a volume, and whether they are writable.
func mountsOf(pod *corev1.PodSpec) map[string]bool {
	writable := make(map[string]bool)
	for _, mount := range pod.Containers[0].VolumeMounts {
		if slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == mount.Name }) {
			writable[mount.MountPath] = !mount.ReadOnly
		}
	}
	return writable
}

// hostServiceDir is the agent's argument with the directory of the host service's socket.
const hostServiceDir = "--host-service-dir=/run/chandler/host"

// TestHostService expects a privileged pod without token and network for each feature that needs one.
// It may write only the attributes of the enabled features.
func TestHostService(t *testing.T) {
	for values, attributes := range map[string]string{
		"passthrough: {enabled: true}": "bind,driver_override,drivers_probe,unbind",
		"reclaim: {enabled: true}":     "reset,reset_method",
		"onDemand: {enabled: true}":    "bind,driver_override,drivers_probe,unbind,current_compute_partition,sriov_numvfs",
	} {
		values += "\nnodeSelector: {a: b}\nhostPaths: {run: /run/other}"
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
		if agent := daemonSet(t, values).Spec.Template.Spec.Containers[0]; !slices.Contains(agent.Args, hostServiceDir) {
			t.Errorf("%s: the agent has args %q", values, agent.Args)
		}
	}
	values := "fpgaProgramming: {enabled: true, bitstreams: /srv/fpga}\nnetworkPolicy: {enabled: false}"
	set := &appsv1.DaemonSet{}
	decode(t, mustRender(t, values, "--show-only=templates/host-service.yaml"), set)
	service, agent := set.Spec.Template.Spec, daemonSet(t, values).Spec.Template.Spec
	if want := []string{"--host-root=/host", "--host-service=/run/chandler/host", "--fpga-bitstreams=/srv/fpga"}; !slices.Equal(service.Containers[0].Args, want) || service.HostPID {
		t.Errorf("FPGA programming: args %q, hostPID %v", service.Containers[0].Args, service.HostPID)
	}
	for _, pod := range []corev1.PodSpec{service, agent} {
		if isWritable, isMounted := mountsOf(&pod)["/host/srv/fpga"]; isWritable || !isMounted {
			t.Errorf("FPGA programming: the directory is mounted %v, writable %v in %s", isMounted, isWritable, pod.Containers[0].Name)
		}
	}
	if !slices.Contains(agent.Containers[0].Args, hostServiceDir) {
		t.Errorf("FPGA programming: the agent has args %q", agent.Containers[0].Args)
	}
	if out, err := render(t, "", "--show-only=templates/host-service.yaml"); err == nil {
		t.Errorf("the service runs without a feature that needs it:\n%s", out)
	}
}

// TestHostServiceOfDriverFiles expects the host service to have no privilege if it only finds the files
// of NVIDIA's driver, and to see no other directory of the host. The agent's configuration and the
// service have the same root.
func TestHostServiceOfDriverFiles(t *testing.T) {
	const below = "config: {driverRoots: {nvidia: /run/nvidia/driver}}\nnvidiaDriver: {root: /run/nvidia}"
	for values, c := range map[string]struct {
		root       string
		mounts     []string
		privileged bool
	}{
		"nvidiaDriver: {root: /run/nvidia/driver}": {"/run/nvidia/driver", []string{"/host/run/nvidia/driver"}, false},
		"nvidiaDriver: {root: /}":                  {"/", []string{"/host/etc/OpenCL", "/host/etc/alternatives", "/host/etc/vulkan", "/host/lib/firmware", "/host/usr"}, false},
		below:                                      {"/run/nvidia/driver", []string{"/host/run/nvidia"}, false},
		below + "\nnvml: {enabled: true}":          {"/run/nvidia/driver", []string{"/dev", "/host/dev", "/host/proc", "/host/run/nvidia", "/host/sys"}, true},
		"nvidiaDriver: {root: /drv}\nreclaim: {enabled: true}": {"/drv", []string{"/host/dev", "/host/drv", "/host/proc", "/host/sys"}, true},
	} {
		set := &appsv1.DaemonSet{}
		decode(t, mustRender(t, values+"\nnetworkPolicy: {enabled: false}", "--show-only=templates/host-service.yaml"), set)
		pod := set.Spec.Template.Spec
		program := pod.Containers[0]
		if !slices.Contains(program.Args, "--serve-files") || !slices.Contains(program.Args, "--driver-root="+c.root) || *pod.AutomountServiceAccountToken {
			t.Errorf("%s: args %q", values, program.Args)
		}
		if got, want := slices.Sorted(maps.Keys(mountsOf(&pod))), append(c.mounts, "/run/chandler/host"); !slices.Equal(got, want) {
			t.Errorf("%s: mounts %q, want %q", values, got, want)
		}
		security := program.SecurityContext
		if isPrivileged := security.Privileged != nil; isPrivileged != c.privileged || !*security.ReadOnlyRootFilesystem {
			t.Errorf("%s: security context %+v", values, security)
		}
		if !c.privileged && (*security.AllowPrivilegeEscalation || !slices.Equal(security.Capabilities.Drop, []corev1.Capability{"ALL"}) || security.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault || security.SELinuxOptions.Type != "container_device_plugin_t" || pod.HostPID) {
			t.Errorf("%s: security context %+v", values, security)
		}
		if got := config(t, values).DriverRoots["nvidia"]; got != c.root {
			t.Errorf("%s: the agent has the root %s", values, got)
		}
	}
}
