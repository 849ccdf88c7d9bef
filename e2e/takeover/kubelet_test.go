package takeover

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// kubelet is a process with a kubelet's device manager and PodResources API (cmd/devicemanager).
type kubelet struct {
	t       *testing.T
	program string
	dir     string // the kubelet's directory
	mute    bool   // without a PodResources API, as is possible in kubelets up to 1.27
	log     log

	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder

	mu   sync.Mutex
	pods []*corev1.Pod // the pods that have not ended
}

// container holds a container's devices and start options.
type container struct {
	IDs     map[string][]string // by resource
	Options options
}

type options struct {
	Envs        []struct{ Name, Value string }
	Mounts      []struct{ ContainerPath, HostPath string }
	Devices     []struct{ PathOnHost, PathInContainer, Permissions string }
	Annotations []struct{ Name, Value string }
	CDIDevices  []struct{ Name string }
}

// nodes returns the sorted paths of a container's device nodes, as seen in the container.
func (o options) nodes() (paths []string) {
	for _, d := range o.Devices {
		paths = append(paths, d.PathInContainer)
	}
	slices.Sort(paths)
	return paths
}

func (o options) env() map[string]string {
	env := make(map[string]string)
	for _, e := range o.Envs {
		env[e.Name] = e.Value
	}
	return env
}

// start starts the kubelet. Pods that have not ended are then already running.
func (k *kubelet) start() {
	k.t.Helper()
	k.cmd = exec.Command(k.program, k.dir)
	k.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	k.cmd.Stderr = &k.log
	var err error
	if k.in, err = k.cmd.StdinPipe(); err != nil {
		k.t.Fatal(err)
	}
	out, err := k.cmd.StdoutPipe()
	if err != nil {
		k.t.Fatal(err)
	}
	k.out = json.NewDecoder(out)
	if err := k.cmd.Start(); err != nil {
		k.t.Fatalf("start kubelet: %v (root is needed, for a mount namespace)", err)
	}
	k.t.Cleanup(k.kill)
	if err := k.ask(map[string]any{"running": k.running()}, nil); err != nil {
		k.t.Fatal(err)
	}
	if k.mute {
		if err := os.Remove(filepath.Join(k.dir, "pod-resources/kubelet.sock")); err != nil {
			k.t.Fatal(err)
		}
	}
}

// kill ends the kubelet like a crash.
func (k *kubelet) kill() {
	_ = k.cmd.Process.Kill()
	_ = k.cmd.Wait() // The process was killed.
}

func (k *kubelet) running() []*corev1.Pod {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.pods)
}

// ask sends a request to the kubelet and returns the error in the kubelet's answer.
func (k *kubelet) ask(request, result any) error {
	k.t.Helper()
	if err := json.NewEncoder(k.in).Encode(request); err != nil {
		k.t.Fatalf("ask kubelet: %v\n%s", err, k.log.String())
	}
	var raw json.RawMessage
	if err := k.out.Decode(&raw); err != nil {
		k.t.Fatalf("ask kubelet: %v\n%s", err, k.log.String())
	}
	var failed struct{ Error string }
	if err := json.Unmarshal(raw, &failed); err != nil {
		k.t.Fatal(err)
	}
	if failed.Error != "" {
		return errors.New(failed.Error)
	}
	if result != nil {
		if err := json.Unmarshal(raw, result); err != nil {
			k.t.Fatal(err)
		}
	}
	return nil
}

// admit admits a pod, which has one container.
func (k *kubelet) admit(pod *corev1.Pod) error {
	k.t.Helper()
	if err := k.ask(map[string]any{"admit": pod}, nil); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods = append(k.pods, pod)
	return nil
}

// end ends a pod.
func (k *kubelet) end(pod *corev1.Pod) {
	k.t.Helper()
	k.mu.Lock()
	k.pods = slices.DeleteFunc(k.pods, func(p *corev1.Pod) bool { return p == pod })
	k.mu.Unlock()
	if err := k.ask(map[string]any{"end": pod.UID}, nil); err != nil {
		k.t.Fatal(err)
	}
}

// look returns the devices of a pod's container, and the options with which it would start now.
func (k *kubelet) look(pod *corev1.Pod) container {
	k.t.Helper()
	var a struct{ Containers map[string]container }
	if err := k.ask(map[string]any{"look": pod.UID}, &a); err != nil {
		k.t.Fatalf("look at pod %s: %v", pod.Name, err)
	}
	return a.Containers[pod.Spec.Containers[0].Name]
}

// offers waits until the wanted number of a resource is allocatable.
func (k *kubelet) offers(resource string, want int64) {
	k.t.Helper()
	var a struct{ Allocatable map[string]int64 }
	for end := time.Now().Add(patience); a.Allocatable[resource] != want; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			k.t.Fatalf("the kubelet can give out %d of %s; want %d", a.Allocatable[resource], resource, want)
		}
		a.Allocatable = nil
		if err := k.ask(map[string]any{"ask": true}, &a); err != nil {
			k.t.Fatal(err)
		}
	}
}

// newPod returns a pod whose one container has a limit for n of a resource. If resource is "",
// there is no limit.
func newPod(name, resource string, n int64) *corev1.Pod {
	pod := &corev1.Pod{}
	pod.Name, pod.Namespace, pod.UID = name, "default", types.UID("uid-of-"+name)
	pod.Spec.NodeName = node
	pod.Spec.Containers = []corev1.Container{{Name: "main"}}
	if resource != "" {
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(resource): quantity(n)}
	}
	return pod
}

// log keeps the output of a process.
type log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements [io.Writer].
func (l *log) Write(text []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(text)
}

// String returns all output so far.
func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// run runs a command to its end.
func run(ctx context.Context, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", args[0], err, out)
	}
	return nil
}
