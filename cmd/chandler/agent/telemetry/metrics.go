// Package telemetry computes the metrics of an agent, and the part of its inventory that concerns
// devices and their consumers.
package telemetry

import (
	"errors"
	"net/http"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/collectors"
	"k8s.io/component-base/metrics"

	"chandler.dev/discovery"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver"
	"chandler.dev/legacy"
)

// Metrics are the metrics of an agent. Those that change with events are in its fields. All other
// metrics are computed on each request; see [State].
type Metrics struct {
	version  string
	registry metrics.KubeRegistry

	calls        *metrics.HistogramVec // calls through DRA
	devicePlugin *metrics.HistogramVec // calls through the device-plugin API
	refusals     *metrics.CounterVec
	scans        *metrics.Histogram
	lastScan     atomic.Pointer[scan.Result] // last scan, nil before the first scan has ended

	// Whether the last configuration is in force, and since when. The names follow the metrics of
	// Prometheus and Alertmanager.
	reloads        *metrics.CounterVec
	configured     *metrics.Gauge
	configuredAt   *metrics.Gauge
	outdatedConfig *metrics.Gauge // whether a change takes effect only after a restart
}

// NewMetrics returns the metrics of an agent. If they are not served, the metrics record no
// values: the registry package keeps every registered metric for the life of the process, and tests
// run thousands of agents in one process.
func NewMetrics(version string, served bool) *Metrics {
	m := &Metrics{version: version}
	m.calls = metrics.NewHistogramVec(&metrics.HistogramOpts{
		Name: "chandler_dra_duration_seconds",
		Help: "How long the kubelet's calls took, by operation (prepare, unprepare), result (success, error) and stage: " +
			"call is all of a call, read the library's getting of its claims from the API server, claim the driver's part for each claim.",
		// The kubelet's own buckets begin at 0.1 s, when most calls have ended.
		Buckets:        metrics.ExponentialBuckets(0.0005, 2, 17),
		StabilityLevel: metrics.ALPHA,
	}, []string{"operation", "stage", "result"})
	m.devicePlugin = metrics.NewHistogramVec(&metrics.HistogramOpts{
		Name: "chandler_device_plugin_duration_seconds",
		Help: "How long the kubelet's calls through the device-plugin API took, by result (success, error) and operation: " +
			"allocate, prefer (GetPreferredAllocation), and list-sent, a list that was sent to ListAndWatch.",
		Buckets:        metrics.ExponentialBuckets(0.0005, 2, 15),
		StabilityLevel: metrics.ALPHA,
	}, []string{"operation", "result"})
	m.refusals = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "chandler_refused_total",
		Help: "Claims that were not prepared (api DRA) and allocations that were refused (api DevicePlugin), by reason: " +
			"allocated, gone, changed, parameters, configuring, waiting, disk, other. The kubelet retries a claim, and each attempt is counted.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"api", "reason"})
	m.scans = metrics.NewHistogram(&metrics.HistogramOpts{
		Name:           "chandler_scan_duration_seconds",
		Help:           "How long scans of the host took.",
		Buckets:        metrics.ExponentialBuckets(0.001, 2, 15),
		StabilityLevel: metrics.ALPHA,
	})
	m.reloads = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "chandler_config_reloads_total",
		Help:           "Configurations that were read, the one at the start included, by result (success, error).",
		StabilityLevel: metrics.ALPHA,
	}, []string{"result"})
	m.configured = metrics.NewGauge(&metrics.GaugeOpts{
		Name:           "chandler_config_last_reload_successful",
		Help:           "1 if the last configuration is in effect, 0 if it is invalid and the previous one remains in effect.",
		StabilityLevel: metrics.ALPHA,
	})
	m.configuredAt = metrics.NewGauge(&metrics.GaugeOpts{
		Name:           "chandler_config_last_reload_success_timestamp_seconds",
		Help:           "When the configuration that is in force was read.",
		StabilityLevel: metrics.ALPHA,
	})
	m.outdatedConfig = metrics.NewGauge(&metrics.GaugeOpts{
		Name:           "chandler_config_restart_needed",
		Help:           "Whether the configuration has changed in what an agent reads only when it starts: 1 until it is started again, else 0.",
		StabilityLevel: metrics.ALPHA,
	})
	if served {
		// A metric records values once it is registered. Registering a metric while another
		// goroutine observes a value is a race (component-base/metrics, lazyMetric).
		m.registry = metrics.NewKubeRegistry()
		m.registry.MustRegister(m.calls, m.devicePlugin, m.refusals, m.scans, m.reloads, m.configured, m.configuredAt, m.outdatedConfig)
		m.begin()
	}
	return m
}

// RecordReload records whether a configuration was read successfully.
func (m *Metrics) RecordReload(err error) {
	m.reloads.WithLabelValues(resultOf(err)).Inc()
	if err != nil {
		m.configured.Set(0)
		return
	}
	m.configured.Set(1)
	m.configuredAt.SetToCurrentTime()
}

// RecordOutdated records whether changes take effect only after a restart of the agent.
func (m *Metrics) RecordOutdated(are bool) {
	m.outdatedConfig.Set(map[bool]float64{true: 1}[are])
}

func resultOf(err error) string {
	if err != nil {
		return "error"
	}
	return "success"
}

// ObserveCall is a [driver.Observer].
func (m *Metrics) ObserveCall(operation, stage string, took time.Duration, err error) {
	m.calls.WithLabelValues(operation, stage, resultOf(err)).Observe(took.Seconds())
	if err != nil && operation == "prepare" && stage == "claim" {
		m.refusals.WithLabelValues(string(discovery.ModeDRA), string(driver.RefusalOf(err))).Inc()
	}
}

// ObserveDevicePlugin is a [legacy.Observer].
func (m *Metrics) ObserveDevicePlugin(operation legacy.Operation, took time.Duration, err error) {
	m.devicePlugin.WithLabelValues(string(operation), resultOf(err)).Observe(took.Seconds())
	if err == nil || operation != legacy.OperationAllocate {
		return
	}
	reason := driver.RefusalOf(err)
	if errors.Is(err, legacy.ErrUnavailable) {
		reason = driver.RefusedGone
	}
	m.refusals.WithLabelValues(string(discovery.ModeDevicePlugin), string(reason)).Inc()
}

// ObserveScan records a scan of a [scan.Watch].
func (m *Metrics) ObserveScan(s scan.Result) {
	m.scans.Observe(s.Took.Seconds())
	m.lastScan.Store(&s)
}

// LastScan returns the last scan, nil before the first scan has ended.
func (m *Metrics) LastScan() *scan.Result { return m.lastScan.Load() }

// Handler serves the metrics of an agent. wrong is nil, or why the agent started without a valid
// configuration. Metrics are left out while their facts are unknown.
func (m *Metrics) Handler(state State, wrong error) http.Handler {
	m.RecordReload(wrong)
	m.registry.CustomMustRegister(&stateCollector{State: state, metrics: m})
	m.registry.RawMustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return metrics.HandlerFor(m.registry, metrics.HandlerOpts{})
}

// begin sets the counters of alerts to 0, because for Prometheus a counter that begins at 1 has not
// increased.
func (m *Metrics) begin() {
	for _, api := range []discovery.Mode{discovery.ModeDRA, discovery.ModeDevicePlugin} {
		for _, reason := range driver.Refusals() {
			m.refusals.WithLabelValues(string(api), string(reason)).Add(0)
		}
	}
	for _, err := range []error{nil, errors.ErrUnsupported} {
		m.reloads.WithLabelValues(resultOf(err)).Add(0)
	}
}

// goVersion returns the version of Go that built the agent.
func goVersion() string { return runtime.Version() }
