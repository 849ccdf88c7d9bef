package kubectl

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
)

// agentContainer is the name of the agent's container.
const agentContainer = "chandler"

// mostLog limits the size of a log, in bytes.
const mostLog = 8 << 20

// commandTimeout limits the run time of a command in an agent's pod.
const commandTimeout = 60 * time.Second

// collectNode collects the data of a node: by commands in the agent's pod, and from the agent's log
// and metrics.
func (r *reportOptions) collectNode(ctx context.Context, c *collection, v *view, node string, agent *corev1.Pod) {
	if agent == nil {
		c.addMissing(node, "no agent runs there that may be seen")
		return
	}
	container := containerOf(agent)
	dir := "nodes/" + node + "/"
	var has []string
	program := programOf(container)
	record := append([]string{program, "record"}, inheritedArgs(container.Args)...)
	if host, stderr, err := r.in(ctx, agent, record); err == nil && len(host) > 0 {
		c.add(dir+"recorded.host", kindHost, host)
		has = append(has, "recorded host "+size(len(host)))
	} else {
		c.addMissing("recorded host of "+node, failureCause(err, stderr))
	}
	// Doctor exits with status 1 if it finds a fault.
	if doctor, stderr, err := r.in(ctx, agent, []string{program, "doctor", "-o", "json"}); json.Valid(doctor) && len(doctor) > 0 {
		c.add(dir+"doctor.json", kindText, doctor)
		has = append(has, doctorText(doctor))
	} else {
		c.addMissing("doctor of "+node, failureCause(err, stderr))
	}
	if r.log(ctx, c, v, agent, dir, node) {
		has = append(has, fmt.Sprintf("agent's log of %d h", int(r.since.Hours())))
	}
	if metrics, err := v.fetchMetrics(ctx, agent, container); err == nil {
		c.add(dir+"metrics.txt", kindText, metrics)
		has = append(has, "metrics")
	} else {
		why := err.Error()
		if apierrors.IsNotFound(err) {
			why = "they are protected, so that a report cannot have them"
		}
		c.addMissing("metrics of "+node, why)
	}
	if len(has) == 0 {
		has = []string{"nothing"}
	}
	c.addLine(node, strings.Join(has, ", "))
}

func containerOf(pod *corev1.Pod) *corev1.Container {
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

// inheritedArgs returns those arguments of the agent that the command record has too.
func inheritedArgs(args []string) (out []string) {
	for _, arg := range args {
		if strings.HasPrefix(arg, "--host-root=") || strings.HasPrefix(arg, "--config=") {
			out = append(out, arg)
		}
	}
	return out
}

// log collects the agent's log, and the log of its previous process after a restart.
func (r *reportOptions) log(ctx context.Context, c *collection, v *view, agent *corev1.Pod, dir, node string) bool {
	options := &corev1.PodLogOptions{Container: containerOf(agent).Name, SinceSeconds: new(int64(r.since.Seconds())), LimitBytes: new(int64(mostLog)), Timestamps: true}
	log, err := v.client.CoreV1().Pods(agent.Namespace).GetLogs(agent.Name, options).DoRaw(ctx)
	if err != nil {
		c.addMissing("agent's log of "+node, err.Error())
		return false
	}
	c.add(dir+"agent.log", kindText, log)
	restarted := slices.ContainsFunc(agent.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.RestartCount > 0 })
	if restarted {
		options.Previous = true
		if before, err := v.client.CoreV1().Pods(agent.Namespace).GetLogs(agent.Name, options).DoRaw(ctx); err == nil {
			c.add(dir+"agent-before.log", kindText, before)
		}
	}
	return true
}

// fetchMetrics fetches the agent's metrics through the API server.
func (v *view) fetchMetrics(ctx context.Context, agent *corev1.Pod, container *corev1.Container) ([]byte, error) {
	for _, port := range container.Ports {
		if port.Name == "http" || port.Name == "metrics" {
			ctx, cancel := context.WithTimeout(ctx, commandTimeout)
			defer cancel()
			return v.client.CoreV1().Pods(agent.Namespace).ProxyGet("http", agent.Name, fmt.Sprint(port.ContainerPort), "metrics", nil).DoRaw(ctx)
		}
	}
	return nil, errors.New("the agent has no port for them")
}

// in runs a command in the agent's pod.
func (o *options) in(ctx context.Context, pod *corev1.Pod, command []string) (stdout, stderr []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	if o.exec != nil {
		return o.exec(ctx, pod, command)
	}
	config, err := o.restConfig()
	if err != nil {
		return nil, nil, err
	}
	client, err := o.connect()
	if err != nil {
		return nil, nil, err
	}
	url := client.CoreV1().RESTClient().Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Container: containerOf(pod).Name, Command: command, Stdout: true, Stderr: true}, scheme.ParameterCodec).URL()
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

// doctorText summarises the result of doctor.
func doctorText(data []byte) string {
	var result struct {
		Categories []struct {
			Checks []struct{ Result, Code string }
		}
	}
	if err := json.Unmarshal(data, &result); err != nil {
		return "doctor"
	}
	codes := make(map[string][]string)
	for _, category := range result.Categories {
		for _, check := range category.Checks {
			codes[check.Result] = append(codes[check.Result], check.Code)
		}
	}
	var parts []string
	for _, bad := range []struct{ result, glyph string }{{"error", "✗"}, {"warning", "!"}} {
		if found := codes[bad.result]; len(found) > 0 {
			parts = append(parts, fmt.Sprintf("%d %s %s", len(found), bad.glyph, strings.Join(found, " ")))
		}
	}
	if len(parts) == 0 {
		return "doctor"
	}
	return "doctor (" + strings.Join(parts, ", ") + ")"
}
