package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"

	"chandler.dev/internal/fleet"
)

// agentSelector selects the agents' pods, for every kind of installation.
const agentSelector = "app.kubernetes.io/name=chandler"

// agentContainer is the name of the agent's container.
const agentContainer = "chandler"

// commandTimeout limits the run time of a command in an agent's pod.
const commandTimeout = 60 * time.Second

// ListAgents returns the agents' pods by node. If a node has two, the newer one is returned.
func ListAgents(ctx context.Context, client kubernetes.Interface) (map[string]*corev1.Pod, error) {
	out := make(map[string]*corev1.Pod)
	pods, err := ListObjects[corev1.Pod](ctx, client.CoreV1().Pods(metav1.NamespaceAll).List, metav1.ListOptions{LabelSelector: agentSelector})
	if err != nil {
		return out, err
	}
	for i := range pods {
		pod := &pods[i]
		owned := metav1.GetControllerOf(pod)
		if owned == nil || owned.Kind != "DaemonSet" || pod.Spec.NodeName == "" || fleet.HasEnded(pod) {
			continue
		}
		if other := out[pod.Spec.NodeName]; other == nil || other.CreationTimestamp.Before(&pod.CreationTimestamp) {
			out[pod.Spec.NodeName] = pod
		}
	}
	return out, nil
}

// ContainerOf returns the agent's container in a pod.
func ContainerOf(pod *corev1.Pod) *corev1.Container {
	for i := range pod.Spec.Containers {
		if pod.Spec.Containers[i].Name == agentContainer {
			return &pod.Spec.Containers[i]
		}
	}
	return &pod.Spec.Containers[0]
}

// programOf returns the path of the program in the agent's container.
func programOf(container *corev1.Container) string {
	return append(slices.Clone(container.Command), "/chandler")[0]
}

// FetchMetrics fetches the agent's metrics through the API server.
func FetchMetrics(ctx context.Context, client kubernetes.Interface, agent *corev1.Pod) ([]byte, error) {
	for _, port := range ContainerOf(agent).Ports {
		if port.Name == "http" || port.Name == "metrics" {
			ctx, cancel := context.WithTimeout(ctx, commandTimeout)
			defer cancel()
			return client.CoreV1().Pods(agent.Namespace).ProxyGet("http", agent.Name, fmt.Sprint(port.ContainerPort), "metrics", nil).DoRaw(ctx)
		}
	}
	return nil, errors.New("the agent has no port for them")
}

// RunInAgent runs a command of the program chandler in an agent's pod.
func (c *Connection) RunInAgent(ctx context.Context, pod *corev1.Pod, args ...string) (stdout, stderr []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	command := slices.Concat([]string{programOf(ContainerOf(pod))}, args)
	if c.Exec != nil {
		return c.Exec(ctx, pod, command)
	}
	config, err := c.RESTConfig()
	if err != nil {
		return nil, nil, err
	}
	client, err := c.NewClient()
	if err != nil {
		return nil, nil, err
	}
	url := client.CoreV1().RESTClient().Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Container: ContainerOf(pod).Name, Command: command, Stdout: true, Stderr: true}, scheme.ParameterCodec).URL()
	// API servers and kubelets support WebSocket here since 1.30 (KEP-4006). Older ones need SPDY.
	executor, err := remotecommand.NewWebSocketExecutor(config, "GET", url.String())
	if err != nil {
		return nil, nil, err
	}
	older, err := remotecommand.NewSPDYExecutor(config, "POST", url)
	if err != nil {
		return nil, nil, err
	}
	var out, errOut bytes.Buffer
	run := func(e remotecommand.Executor) error {
		out.Reset()
		errOut.Reset()
		return e.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: limitBuffer(&out), Stderr: limitBuffer(&errOut)})
	}
	if err = run(executor); err != nil && out.Len()+errOut.Len() == 0 && ctx.Err() == nil {
		err = run(older)
	}
	return out.Bytes(), errOut.Bytes(), err
}

// limitBuffer limits the size of a buffer to mostOutput.
func limitBuffer(to *bytes.Buffer) io.Writer { return &limit{to} }

type limit struct{ to *bytes.Buffer }

// mostOutput limits the output of a command, in bytes.
const mostOutput = 64 << 20

func (l *limit) Write(p []byte) (int, error) {
	if l.to.Len()+len(p) > mostOutput {
		return 0, errors.New("its output is too long")
	}
	return l.to.Write(p)
}
