// Package chandler installs Chandler on a cluster from the project's manifests and program,
// and runs the agent on a simulated host.
package chandler

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"sigs.k8s.io/yaml"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/cluster"
	"chandler.dev/e2e/kubectl"
)

// Names used in the manifests.
const (
	Namespace  = "chandler"
	DaemonSet  = "chandler"
	Driver     = "chandler.dev"
	AgentImage = "registry.example.com/chandler:v0.1.0" // in the plain manifests
	ProbeImage = "chandler.dev/probe:latest"
)

// HostDir is the directory of a simulated host on the node.
const HostDir = "/var/lib/chandler/host"

// StateDir is the directory of the agent's records, RecordDir its subdirectory for records of
// claims, and MetadataDir its subdirectory for the metadata files of containers.
const (
	StateDir    = "/var/lib/kubelet/plugins/" + Driver
	RecordDir   = StateDir + "/claims"
	MetadataDir = StateDir + "/metadata"

	// earlierMetadataDir is the directory of metadata files in [Earlier].
	earlierMetadataDir = StateDir + "/dra-device-metadata"

	CDIDir = "/var/run/cdi"

	// RunDir is the directory for state until the next reboot; see values.yaml.
	RunDir = "/var/lib/chandler/run"
)

// A Project is a checkout of Chandler with its built programs.
type Project struct {
	Dir   string // the checkout
	Agent string // path of the agent's program
	Probe string // path of the example pods' program
	// Plugin builds the kubectl plugin at the first call, and returns its path.
	Plugin func() (string, error)
}

// Build builds the agent of the checkout in dir as a static program, like its Makefile.
func Build(ctx context.Context, builder build.Builder, programs build.Programs, dir string) (Project, error) {
	agent, err := builder.Agent(ctx, dir)
	if err != nil {
		return Project{}, err
	}
	plugin := sync.OnceValues(func() (string, error) { return builder.Plugin(context.WithoutCancel(ctx), dir) })
	return Project{Dir: dir, Agent: agent, Plugin: plugin, Probe: programs.Program("probe")}, nil
}

// Manifest returns the path of a manifest of the project.
func (p Project) Manifest(name string) string { return filepath.Join(p.Dir, "deployments", name) }

// LoadImages builds the images of the agent and of the example pods, like the Dockerfile, and
// loads them into the node.
func (p Project) LoadImages(ctx context.Context, n *cluster.Node) error {
	return errors.Join(
		p.LoadAgent(ctx, n, AgentImage),
		n.LoadImage(ctx, cluster.Image{
			Name: ProbeImage, Files: map[string]string{"/probe": p.Probe}, Entrypoint: []string{"/probe"},
		}),
	)
}

// LoadAgent builds an image of the agent with the given name, and loads the image into the
// node.
func (p Project) LoadAgent(ctx context.Context, n *cluster.Node, name string) error {
	return n.LoadImage(ctx, cluster.Image{Name: name, Files: map[string]string{"/chandler": p.Agent}, Entrypoint: []string{"/chandler"}})
}

// Simulate creates a simulated host on the node from recorded hosts and from the real devices
// of this machine, which take precedence.
func (p Project) Simulate(ctx context.Context, n *cluster.Node, hosts ...string) error {
	own := filepath.Join(n.NodePath("/var/lib"), "own.host")
	if _, err := p.run(ctx, "record", "--comment", "This machine.", "-o", own); err != nil {
		return err
	}
	dir := n.NodePath(HostDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("simulate host: %w", err)
	}
	args := append([]string{"simulate", "--device-nodes", dir}, hosts...)
	_, err := p.run(ctx, append(args, own)...)
	return err
}

// Discover returns the output of "chandler discover" on the simulated host.
func (p Project) Discover(ctx context.Context, n *cluster.Node, args ...string) ([]byte, error) {
	return p.run(ctx, append([]string{"discover", "--host-root", n.NodePath(HostDir)}, args...)...)
}

// Validate returns the output of "kubectl chandler validate" for a manifest, and an error for an
// invalid manifest.
func (p Project) Validate(ctx context.Context, manifest string) (string, error) {
	program, err := p.Plugin()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, program, "validate", "-")
	cmd.Stdin = strings.NewReader(manifest)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (p Project) run(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, p.Agent, args...)
	out, err := cmd.Output()
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		return nil, fmt.Errorf("chandler %s: %w\n%s", args[0], err, failed.Stderr)
	}
	return out, err
}

// Install applies the agent's manifests with the configuration in the manifest named config,
// on the simulated host, and waits until the agent runs. If the API server does not serve
// resource.k8s.io, the objects of that group and the admission policies are omitted.
func (p Project) Install(ctx context.Context, k *kubectl.Client, config string) error {
	if err := p.ApplyObjects(ctx, k, p.Manifest(config)); err != nil {
		return err
	}
	return p.Stand(ctx, k, HostDir)
}

// InstallHere applies the agent's manifests with the configuration in the file config, on the node
// itself, with YAML patches of the DaemonSet, and waits until the agent runs.
func (p Project) InstallHere(ctx context.Context, k *kubectl.Client, config string, patches ...string) error {
	if err := p.ApplyObjects(ctx, k, config); err != nil {
		return err
	}
	agent, err := p.patched(patches)
	if err != nil {
		return err
	}
	return stand(ctx, k, agent)
}

// ApplyObjects applies all manifests of the agent except the DaemonSet, with the configuration in the
// file config.
func (p Project) ApplyObjects(ctx context.Context, k *kubectl.Client, config string) error {
	manifests := []string{p.Manifest("namespace.yaml"), p.Manifest("rbac.yaml"), p.Manifest("network-policy.yaml"), config}
	_, err := k.Discovery().ServerResourcesForGroupVersion(resourceapi.SchemeGroupVersion.String())
	switch {
	case err == nil:
		for _, name := range []string{"examples/deviceclasses-all.yaml", "admission.yaml", "admission-slices.yaml", "admission-claims.yaml", "admission-events.yaml", "admission-pods.yaml"} {
			manifests = append(manifests, p.Manifest(name))
		}
	case !apierrors.IsNotFound(err):
		return err
	}
	return k.ApplyFiles(ctx, manifests...)
}

// Stand applies the agent's DaemonSet with YAML patches, on the simulated host in a directory
// of the node, and waits until the agent runs and no other agent remains.
func (p Project) Stand(ctx context.Context, k *kubectl.Client, dir string, patches ...string) error {
	agent, err := p.patched(patches)
	if err != nil {
		return err
	}
	simulate(agent, dir)
	return stand(ctx, k, agent)
}

func stand(ctx context.Context, k *kubectl.Client, agent *appsv1.DaemonSet) error {
	manifest, err := yaml.Marshal(agent)
	if err != nil {
		return err
	}
	if err := k.Apply(ctx, string(manifest)); err != nil {
		return err
	}
	if err := WaitForAgent(ctx, k); err != nil {
		return err
	}
	return k.Until(ctx, "the agent before it to be gone", func(ctx context.Context) error {
		_, err := AgentPod(ctx, k)
		return err
	})
}

// patched returns the DaemonSet with YAML patches.
func (p Project) patched(patches []string) (*appsv1.DaemonSet, error) {
	data, err := os.ReadFile(p.Manifest("daemonset.yaml"))
	if err == nil {
		data, err = yaml.YAMLToJSONStrict(data)
	}
	if err != nil {
		return nil, fmt.Errorf("daemonset.yaml: %w", err)
	}
	for _, patch := range patches {
		change, err := yaml.YAMLToJSONStrict([]byte(patch))
		if err != nil {
			return nil, fmt.Errorf("patch of the DaemonSet: %w", err)
		}
		if data, err = strategicpatch.StrategicMergePatch(data, change, appsv1.DaemonSet{}); err != nil {
			return nil, fmt.Errorf("patch the DaemonSet: %w", err)
		}
	}
	agent := &appsv1.DaemonSet{}
	if err := yaml.UnmarshalStrict(data, agent); err != nil {
		return nil, fmt.Errorf("daemonset.yaml: %w", err)
	}
	return agent, nil
}

// simulate sets the directories of a simulated host in the DaemonSet, and frequent scans, because
// no kernel reports changes. The node's feature file is written there as well, so this machine
// remains unchanged.
func simulate(agent *appsv1.DaemonSet, dir string) {
	pod := &agent.Spec.Template.Spec
	for _, volume := range pod.Volumes {
		if slices.Contains([]string{"sys", "proc", "dev", "features"}, volume.Name) {
			volume.HostPath.Path = dir + "/" + volume.Name
		}
	}
	pod.Containers[0].Args = append(pod.Containers[0].Args, "--runtime-root="+dir, "--rescan-interval=250ms", "-v=4")
}

// WaitForAgent waits until the agent runs in the version applied last. After a timeout, the
// error contains the state of the agent's pod and its log.
func WaitForAgent(ctx context.Context, k *kubectl.Client) error {
	err := k.Until(ctx, "the agent to run", func(ctx context.Context) error {
		agent, err := k.AppsV1().DaemonSets(Namespace).Get(ctx, DaemonSet, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s := agent.Status
		if s.ObservedGeneration < agent.Generation || s.DesiredNumberScheduled == 0 || s.NumberAvailable < s.DesiredNumberScheduled || s.UpdatedNumberScheduled < s.DesiredNumberScheduled {
			return fmt.Errorf("%d of %d pods are available", s.NumberAvailable, s.DesiredNumberScheduled)
		}
		// The status may still count a pod that was deleted a moment ago.
		pods, err := k.CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(agent.Spec.Selector)})
		if err != nil {
			return err
		}
		if ready := readyOf(pods.Items); ready < int(s.DesiredNumberScheduled) {
			return fmt.Errorf("%d of %d pods are ready", ready, s.DesiredNumberScheduled)
		}
		return nil
	})
	if err == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	pod, podErr := AgentPod(ctx, k)
	if podErr != nil {
		return errors.Join(err, podErr)
	}
	_, story := k.WaitForPod(ctx, Namespace, pod.Name, corev1.PodRunning)
	log, logErr := k.Logs(context.WithoutCancel(ctx), Namespace, pod.Name, "")
	return errors.Join(err, story, fmt.Errorf("its log:\n%s", log), logErr)
}

// readyOf returns the number of pods that are ready and were not deleted.
func readyOf(pods []corev1.Pod) (ready int) {
	for i := range pods {
		if pods[i].DeletionTimestamp == nil && slices.ContainsFunc(pods[i].Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		}) {
			ready++
		}
	}
	return ready
}

// AgentPod returns the agent's pod on a cluster with one node.
func AgentPod(ctx context.Context, k *kubectl.Client) (*corev1.Pod, error) {
	pods, err := k.CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=chandler"})
	if err != nil {
		return nil, err
	}
	if len(pods.Items) != 1 {
		return nil, fmt.Errorf("there are %d pods of the agent", len(pods.Items))
	}
	return &pods.Items[0], nil
}

// Devices returns the devices in the agent's ResourceSlices, by name.
func Devices(ctx context.Context, k *kubectl.Client) (map[string]resourceapi.Device, error) {
	slices, err := k.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + Driver})
	if err != nil {
		return nil, err
	}
	devices := make(map[string]resourceapi.Device)
	for _, slice := range slices.Items {
		for _, device := range slice.Spec.Devices {
			devices[device.Name] = device
		}
	}
	return devices, nil
}

// Held returns the paths of all CDI specs, records and metadata files of claims on the node.
func Held(n *cluster.Node) ([]string, error) {
	var held []string
	for _, dir := range []string{CDIDir, RecordDir, MetadataDir, earlierMetadataDir} {
		err := fs.WalkDir(os.DirFS(n.NodePath(dir)), ".", func(name string, entry fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err == nil && entry.Type().IsRegular() {
				held = append(held, filepath.Join(dir, name))
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return held, nil
}
