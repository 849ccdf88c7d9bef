package agent

import (
	"context"
	"encoding/json"
	"maps"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/statefile"
	"chandler.dev/cmd/chandler/agent/telemetry"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/podevents"
)

// KeptConfig is the file, in the agent's directory, with the last valid configuration. An agent
// that starts with an invalid configuration uses this file.
const KeptConfig = "config.yaml"

// KeptLabels is the file, in the agent's directory, with the node labels in force. A new agent uses
// this file until it receives the labels, so that a start without an API server changes nothing.
const KeptLabels = "labels.json"

// keepInterval is how often a file that could not be written, or was removed, is written again.
const keepInterval = 30 * time.Second

// liveSettings are the settings in force. They follow the changes of the configuration.
type liveSettings struct {
	config      *Config // has the settings at the start
	metrics     *telemetry.Metrics
	requestScan func() // begins a scan, to settle the states of devices by a new severity

	current atomic.Pointer[Settings]
	failure atomic.Pointer[error] // why the newest configuration is invalid

	rulesChanged  chan *rules.Rules // has a value when the rules of the settings changed
	changed       chan struct{}     // has a value when the settings changed
	labelsChanged chan struct{}     // has a value when the labels of the node may have changed
	firstValid    chan struct{}     // closed at the first valid configuration after the start
	reports       chan error        // has a value to report: why the configuration is invalid, or nil
}

// newLiveSettings returns the settings at the start.
func newLiveSettings(config *Config, metrics *telemetry.Metrics, requestScan func()) *liveSettings {
	s := &liveSettings{
		config: config, metrics: metrics, requestScan: requestScan, rulesChanged: make(chan *rules.Rules, 1), changed: make(chan struct{}, 1),
		labelsChanged: make(chan struct{}, 1), firstValid: make(chan struct{}), reports: make(chan error, 1),
	}
	s.current.Store(&config.Settings)
	return s
}

// inForce returns the settings in force.
func (s *liveSettings) inForce() *Settings { return s.current.Load() }

// goneEffect returns the taint effect for devices that are gone.
func (s *liveSettings) goneEffect() resourceapi.DeviceTaintEffect {
	return s.inForce().Severity.EffectOf(discovery.ConditionGone)
}

// save saves the configuration in force, until the context ends.
func (s *liveSettings) save(ctx context.Context) {
	memoOf := func(name string) *statefile.File {
		return statefile.Open(ctx, s.config.files(), filepath.Join(s.config.StateDir, name), func([]byte) error { return nil })
	}
	config, labels := memoOf(KeptConfig), memoOf(KeptLabels)
	for ctx.Err() == nil {
		settings := s.inForce()
		if settings.Text != nil {
			config.Write(ctx, settings.Text)
		}
		if data, err := json.Marshal(settings.Labels); err == nil && settings.Labels != nil { // Marshal cannot fail here
			labels.Write(ctx, data)
		}
		waitFor(ctx, s.changed, keepInterval)
	}
}

// follow puts changed settings in force until the context ends. If a configuration is
// invalid, the previous one stays in force.
func (s *liveSettings) follow(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case change := <-s.config.Changes:
			s.applyChange(ctx, change)
		}
	}
}

func (s *liveSettings) applyChange(ctx context.Context, change Change) {
	s.metrics.RecordReload(change.Err)
	replace(s.reports, change.Err)
	if change.Err != nil {
		s.failure.Store(&change.Err)
		klog.FromContext(ctx).Error(change.Err, "The new configuration is invalid; the previous one remains in effect")
		return
	}
	s.failure.Store(nil)
	before := s.current.Swap(&change.Settings)
	notify(s.changed)
	notify(s.labelsChanged)
	if before == &s.config.Settings {
		close(s.firstValid)
	}
	if change.Settings.Rules == before.Rules {
		return // the node's labels changed, but no setting depends on them
	}
	klog.FromContext(ctx).Info("The configuration changed")
	s.warnOutdated(ctx)
	replace(s.rulesChanged, change.Settings.Rules)
	s.requestScan()
}

// outdatedFields returns the changed fields of the configuration that need a restart of the agent.
func (s *liveSettings) outdatedFields() (fields []string) {
	started, now := &s.config.Settings, s.inForce()
	for _, field := range []struct {
		name string
		same bool
	}{
		{"driverRoots", reflect.DeepEqual(now.Roots, started.Roots)},
		{"paths", reflect.DeepEqual(now.Paths, started.Paths)},
		{"hooks", now.NoHooks == started.NoHooks},
		{"passthrough", discovery.EqualSelections(now.Passthrough, started.Passthrough)},
		{"onDemand.virtualFunctions", discovery.EqualSelections(now.VirtualFunctions, started.VirtualFunctions)},
		{"onDemand.partitions", discovery.EqualSelections(now.Partition, started.Partition)},
		{"onDemand.mps or onDemand.timeSlices", maps.EqualFunc(now.SharingDaemons, started.SharingDaemons, discovery.EqualSelections[struct{}])},
		{"resources.sriov", started.Pools || !now.Pools}, // with a pool at the start, the families already describe physical functions
	} {
		if !field.same {
			fields = append(fields, field.name)
		}
	}
	return fields
}

// warnOutdated logs the changes that need a restart of the agent.
func (s *liveSettings) warnOutdated(ctx context.Context) {
	fields := s.outdatedFields()
	s.metrics.RecordOutdated(len(fields) > 0)
	if len(fields) > 0 {
		klog.FromContext(ctx).Info("Warning: the configuration changed in what is in force only once the agent is started again; all else is in force now", "fields", fields)
	}
}

// stillWrong returns the error in the configuration. It returns nil if the configuration at the
// start was valid, or if a valid one has arrived since.
func (s *liveSettings) stillWrong() error {
	if s.inForce() != &s.config.Settings || s.config.ConfigError == nil {
		return nil
	}
	if since := s.failure.Load(); since != nil {
		return *since
	}
	return s.config.ConfigError
}

// configError returns the error that prevents the newest configuration from taking effect, nil if
// it is in force.
func (s *liveSettings) configError() error {
	if why := s.failure.Load(); why != nil {
		return *why
	}
	return s.stillWrong()
}

// complainInterval is the time until an Event is retried.
const complainInterval = 10 * time.Second

// reportInvalid reports an invalid configuration in Events of the agent's own pod.
func (s *liveSettings) reportInvalid(ctx context.Context) {
	namespace, name, isPod := strings.Cut(s.config.Pod, "/")
	if !isPod {
		return
	}
	pod := podevents.Pod{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}, UID: s.config.PodUID}
	var again <-chan time.Time
	var wrong error
	for {
		select {
		case <-ctx.Done():
			return
		case wrong = <-s.reports:
		case <-again:
		}
		again = nil
		if wrong == nil {
			continue
		}
		if err := podevents.TellOfConfig(ctx, s.config.StatusClient, s.config.NodeName, &pod, wrong); err != nil {
			klog.FromContext(ctx).V(2).Info("The Event about the configuration is not written yet", "reason", err.Error())
			again = time.After(complainInterval)
		}
	}
}
