package kubectl

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"chandler.dev/cmd/kubectl-chandler/kubectl/cluster"
	"chandler.dev/discovery"
	"chandler.dev/internal/fleet"
)

const (
	// maxQueries limits the number of agents to query, because a user waits for the answer.
	maxQueries = 16
	// askPatience is the time limit for all agents together.
	askPatience = 5 * time.Second
)

// describedDevice is a device in an agent's metrics.
type describedDevice struct{ label, model string }

// answers holds data from the agents' metrics that the API server does not have.
type answers struct {
	devices map[string]map[string]describedDevice // by node and name
	waiting map[string]int                        // devices that wait for release before the other API offers them, by node
	why     map[string]string                     // the reason for an agent's missing answer, by node
}

// queryAgents queries the agents of nodes for the devices that pods have by the device plugin API.
func (v *view) queryAgents(ctx context.Context, w *whoView) {
	nodes := w.askableNodes()
	if len(nodes) == 0 {
		return
	}
	said, why := v.askAgents(ctx, nodes)
	w.answers = answers{devices: make(map[string]map[string]describedDevice), waiting: make(map[string]int), why: why}
	for _, node := range nodes {
		if families, answered := said[node]; answered {
			w.readAgentMetrics(node, families)
		}
	}
}

// askAgents fetches the metrics of the nodes' agents through the API server. why holds the reason
// for each missing answer. The user needs permission to get pods/proxy, and agents with protected
// metrics do not answer. Nodes without an agent are in neither map: their devices belong to other
// drivers.
func (v *view) askAgents(ctx context.Context, nodes []string) (said map[string]map[string]*dto.MetricFamily, why map[string]string) {
	said, why = make(map[string]map[string]*dto.MetricFamily), make(map[string]string)
	agents, err := cluster.ListAgents(ctx, v.Client)
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	var mu sync.Mutex
	var all sync.WaitGroup
	asked := 0
	for _, node := range nodes {
		agent := agents[node]
		switch {
		case err != nil:
			why[node] = briefReason(err)
			continue
		case agent == nil:
			continue
		case asked == maxQueries:
			mu.Lock()
			why[node] = "there are too many nodes"
			mu.Unlock()
			continue
		}
		asked++
		all.Go(func() {
			families, err := v.readMetrics(ctx, agent)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				why[node] = briefReason(err)
				return
			}
			said[node] = families
		})
	}
	all.Wait()
	return said, why
}

// briefReason describes briefly the cause of an agent's missing answer.
func briefReason(err error) string {
	switch {
	case apierrors.IsForbidden(err):
		return "you may not get pods/proxy"
	case apierrors.IsNotFound(err):
		return "its metrics are protected"
	}
	return err.Error()
}

// readMetrics returns an agent's metrics.
func (v *view) readMetrics(ctx context.Context, agent *corev1.Pod) (map[string]*dto.MetricFamily, error) {
	text, err := cluster.FetchMetrics(ctx, v.Client, agent)
	if err != nil {
		return nil, err
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	return parser.TextToMetricFamilies(bytes.NewReader(text))
}

// askableNodes returns the nodes whose agents have more data: the requested node, and the nodes on
// which pods have devices by the device plugin API.
func (w *whoView) askableNodes() (nodes []string) {
	if w.Node != "" {
		nodes = append(nodes, w.Node)
	}
	for _, r := range w.Resources {
		if len(r.Holders) > 0 && !slices.Contains(nodes, r.Node) {
			nodes = append(nodes, r.Node)
		}
	}
	return nodes
}

// readAgentMetrics reads from an agent's metrics the devices that pods have by the device plugin
// API, and the number of waiting devices.
func (w *whoView) readAgentMetrics(node string, families map[string]*dto.MetricFamily) {
	for _, value := range metricSamples(families["chandler_devices_waiting"]) {
		w.answers.waiting[node] += int(value)
	}
	devices := make(map[string]describedDevice)
	for labels := range metricSamples(families["chandler_device_info"]) {
		devices[labels["device"]] = describeByLabels(labels)
	}
	w.answers.devices[node] = devices
	for labels := range metricSamples(families["chandler_device_allocated"]) {
		if labels["api"] != string(discovery.ModeDevicePlugin) {
			continue
		}
		for i := range w.Resources {
			r := &w.Resources[i]
			if r.Node != node || r.Name != labels["resource"] {
				continue
			}
			for j := range r.Holders {
				h := &r.Holders[j]
				if h.Namespace == labels["namespace"] && h.Pod == labels["pod"] && !slices.Contains(h.Devices, labels["device"]) {
					h.Devices = append(h.Devices, labels["device"])
				}
			}
		}
	}
	for i := range w.Resources {
		for j := range w.Resources[i].Holders {
			slices.Sort(w.Resources[i].Holders[j].Devices)
		}
	}
}

// describeByLabels describes a device by the labels of chandler_device_info.
func describeByLabels(labels map[string]string) describedDevice {
	name := labels["device"]
	label := strings.TrimSpace(labels["kind"] + " " + cmp.Or(fleet.ShortAddress(labels["pci_address"]), name))
	if parent := labels["parent"]; parent != "" {
		if part, is := strings.CutPrefix(name, parent+"-"); is {
			label += " " + strings.ReplaceAll(part, "-", " ")
		}
	}
	return describedDevice{label: label, model: labels["model"]}
}

// metricSamples returns the labels and values of a metric, in the agent's order.
func metricSamples(family *dto.MetricFamily) func(yield func(map[string]string, float64) bool) {
	return func(yield func(map[string]string, float64) bool) {
		for _, m := range family.GetMetric() {
			labels := make(map[string]string)
			for _, pair := range m.GetLabel() {
				labels[pair.GetName()] = pair.GetValue()
			}
			if !yield(labels, m.GetGauge().GetValue()) {
				return
			}
		}
	}
}

// unknownReason explains why the devices that pods have by the device plugin API are unknown on
// some nodes.
func (w *whoView) unknownReason() string {
	var nodes []string
	for _, r := range w.Resources {
		unknown := slices.ContainsFunc(r.Holders, func(h fleet.Holder) bool { return len(h.Devices) == 0 })
		if unknown && !slices.Contains(nodes, r.Node) {
			nodes = append(nodes, r.Node)
		}
	}
	for _, node := range nodes {
		if why := w.answers.why[node]; why != "" {
			return fmt.Sprintf("the agent of %s does not report the device, because %s: run chandler inventory on the node.", node, why)
		}
	}
	if len(nodes) == 0 {
		return ""
	}
	return "only the node has the name of the device: run chandler inventory on the node."
}
