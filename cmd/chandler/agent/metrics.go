package agent

import (
	"net/http"
	"time"

	"k8s.io/component-base/metrics"

	"chandler.dev/discovery"
	"chandler.dev/driver/features"
)

// agentMetrics are what the agent says of itself at /metrics.
type agentMetrics struct {
	calls *metrics.HistogramVec
}

func newAgentMetrics() *agentMetrics {
	return &agentMetrics{calls: metrics.NewHistogramVec(&metrics.HistogramOpts{
		Name: "chandler_dra_duration_seconds",
		Help: "How long the kubelet's calls took, by operation (prepare, unprepare), result (success, error) and stage: " +
			"call is all of a call, read the library's getting of its claims from the API server, claim the driver's part for each claim.",
		// The kubelet's own begin at 0.1 s, where most calls have long ended.
		Buckets:        metrics.ExponentialBuckets(0.0005, 2, 17),
		StabilityLevel: metrics.ALPHA,
	}, []string{"operation", "stage", "result"})}
}

// observe is a [driver.Observer].
func (m *agentMetrics) observe(operation, stage string, took time.Duration, err error) {
	result := "success"
	if err != nil {
		result = "error"
	}
	m.calls.WithLabelValues(operation, stage, result).Observe(took.Seconds())
}

// handler answers with the metrics of the agent. There is none of what is not
// known yet.
func (m *agentMetrics) handler(state agentState) http.Handler {
	registry := metrics.NewKubeRegistry()
	registry.MustRegister(m.calls)
	registry.CustomMustRegister(&stateCollector{agentState: state})
	return metrics.HandlerFor(registry, metrics.HandlerOpts{})
}

// agentState is what is looked at whenever metrics are asked for.
type agentState struct {
	features func() []features.Feature
	prepared func() int
	placed   func() *placed // nil before it is known
}

// stateCollector makes metrics of the state.
type stateCollector struct {
	metrics.BaseStableCollector
	agentState
}

var (
	featureMetric = metrics.NewDesc("chandler_dra_server_feature_enabled",
		"Whether the API server keeps the fields of ResourceSlices that belong to a feature: 1, or 0 where it drops or refuses them and something else is published instead.",
		[]string{"feature"}, nil, metrics.ALPHA, "")
	preparedMetric = metrics.NewDesc("chandler_dra_prepared_claims", "Claims that are prepared on this node.", nil, nil, metrics.ALPHA, "")
	devicesMetric  = metrics.NewDesc("chandler_devices",
		"Devices of the host by family, by the API that offers them, and by what is wrong with them: healthy, or a condition such as unknown.",
		[]string{"family", "api", "health"}, nil, metrics.ALPHA, "")
)

// DescribeWithStability implements [metrics.StableCollector].
func (s *stateCollector) DescribeWithStability(descriptions chan<- *metrics.Desc) {
	descriptions <- featureMetric
	descriptions <- preparedMetric
	descriptions <- devicesMetric
}

// CollectWithStability implements [metrics.StableCollector].
func (s *stateCollector) CollectWithStability(all chan<- metrics.Metric) {
	gauge := func(of *metrics.Desc, value float64, labels ...string) {
		all <- metrics.NewLazyConstMetric(of, metrics.GaugeValue, value, labels...)
	}
	for _, feature := range s.features() {
		kept := 0.0
		if feature.Kept {
			kept = 1
		}
		gauge(featureMetric, kept, feature.Name)
	}
	gauge(preparedMetric, float64(s.prepared()))
	for labels, n := range countDevices(s.placed()) {
		gauge(devicesMetric, float64(n), labels.family, labels.api, labels.health)
	}
}

type deviceLabels struct{ family, api, health string }

// countDevices counts the devices that an API has.
func countDevices(p *placed) map[deviceLabels]int {
	counts := make(map[deviceLabels]int)
	if p == nil {
		return counts
	}
	for i := range p.snapshot.Devices {
		d := &p.snapshot.Devices[i]
		api := p.placement.API[d.Silicon()]
		if api == discovery.ModeAuto {
			continue
		}
		labels := deviceLabels{d.Family, string(api), "healthy"}
		if key := d.Health.Key(); key != "" {
			labels.health = string(key)
		}
		counts[labels]++
	}
	return counts
}
