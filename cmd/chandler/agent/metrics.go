package agent

import (
	"net/http"
	"time"

	"k8s.io/component-base/metrics"

	"chandler.dev/discovery"
	"chandler.dev/driver/features"
)

// agentMetrics are the metrics of the agent that change with events.
type agentMetrics struct {
	calls *metrics.HistogramVec

	// Whether the configuration that was read last is in force, and since when.
	// Prometheus and its Alertmanager name theirs likewise.
	configured   *metrics.Gauge
	configuredAt *metrics.Gauge
}

func newAgentMetrics() *agentMetrics {
	m := &agentMetrics{calls: metrics.NewHistogramVec(&metrics.HistogramOpts{
		Name: "chandler_dra_duration_seconds",
		Help: "How long the kubelet's calls took, by operation (prepare, unprepare), result (success, error) and stage: " +
			"call is all of a call, read the library's getting of its claims from the API server, claim the driver's part for each claim.",
		// The kubelet's own buckets begin at 0.1 s, when most calls have ended.
		Buckets:        metrics.ExponentialBuckets(0.0005, 2, 17),
		StabilityLevel: metrics.ALPHA,
	}, []string{"operation", "stage", "result"})}
	m.configured = metrics.NewGauge(&metrics.GaugeOpts{
		Name:           "chandler_config_last_reload_successful",
		Help:           "Whether the configuration that was read last is in force: 1, or 0 if it is wrong and the one before is.",
		StabilityLevel: metrics.ALPHA,
	})
	m.configuredAt = metrics.NewGauge(&metrics.GaugeOpts{
		Name:           "chandler_config_last_reload_success_timestamp_seconds",
		Help:           "When the configuration that is in force was read.",
		StabilityLevel: metrics.ALPHA,
	})
	return m
}

// reloaded notes what became of a configuration that was read.
func (m *agentMetrics) reloaded(err error) {
	if err != nil {
		m.configured.Set(0)
		return
	}
	m.configured.Set(1)
	m.configuredAt.SetToCurrentTime()
}

// observe is a [driver.Observer].
func (m *agentMetrics) observe(operation, stage string, took time.Duration, err error) {
	result := "success"
	if err != nil {
		result = "error"
	}
	m.calls.WithLabelValues(operation, stage, result).Observe(took.Seconds())
}

// handler answers with the metrics of an agent that starts with a configuration, or
// because of wrong without. Metrics of facts that are not known yet are left out.
func (m *agentMetrics) handler(state agentState, wrong error) http.Handler {
	registry := metrics.NewKubeRegistry()
	registry.MustRegister(m.calls, m.configured, m.configuredAt)
	m.reloaded(wrong) // a metric takes values once it is registered
	registry.CustomMustRegister(&stateCollector{agentState: state})
	return metrics.HandlerFor(registry, metrics.HandlerOpts{})
}

// agentState is the state that is read whenever metrics are asked for.
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
