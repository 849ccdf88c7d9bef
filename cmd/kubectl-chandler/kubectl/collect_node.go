package kubectl

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"chandler.dev/cmd/kubectl-chandler/kubectl/cluster"
)

// mostLog limits the size of a log, in bytes.
const mostLog = 8 << 20

// collectNode collects the data of a node: by commands in the agent's pod, and from the agent's log
// and metrics.
func (r *reportOptions) collectNode(ctx context.Context, c *collection, v *view, node string, agent *corev1.Pod) {
	if agent == nil {
		c.addMissing(node, "no agent runs there that may be seen")
		return
	}
	dir := "nodes/" + node + "/"
	var has []string
	record := append([]string{"record"}, inheritedArgs(cluster.ContainerOf(agent).Args)...)
	if host, stderr, err := r.RunInAgent(ctx, agent, record...); err == nil && len(host) > 0 {
		c.add(dir+"recorded.host", kindHost, host)
		has = append(has, "recorded host "+size(len(host)))
	} else {
		c.addMissing("recorded host of "+node, failureCause(err, stderr))
	}
	// Doctor exits with status 1 if it finds a fault.
	if doctor, stderr, err := r.RunInAgent(ctx, agent, "doctor", "-o", "json"); json.Valid(doctor) && len(doctor) > 0 {
		c.add(dir+"doctor.json", kindText, doctor)
		has = append(has, doctorText(doctor))
	} else {
		c.addMissing("doctor of "+node, failureCause(err, stderr))
	}
	if r.log(ctx, c, v, agent, dir, node) {
		has = append(has, fmt.Sprintf("agent's log of %d h", int(r.since.Hours())))
	}
	if metrics, err := cluster.FetchMetrics(ctx, v.Client, agent); err == nil {
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
	options := &corev1.PodLogOptions{Container: cluster.ContainerOf(agent).Name, SinceSeconds: new(int64(r.since.Seconds())), LimitBytes: new(int64(mostLog)), Timestamps: true}
	log, err := v.Client.CoreV1().Pods(agent.Namespace).GetLogs(agent.Name, options).DoRaw(ctx)
	if err != nil {
		c.addMissing("agent's log of "+node, err.Error())
		return false
	}
	c.add(dir+"agent.log", kindText, log)
	restarted := slices.ContainsFunc(agent.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.RestartCount > 0 })
	if restarted {
		options.Previous = true
		if before, err := v.Client.CoreV1().Pods(agent.Namespace).GetLogs(agent.Name, options).DoRaw(ctx); err == nil {
			c.add(dir+"agent-before.log", kindText, before)
		}
	}
	return true
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
