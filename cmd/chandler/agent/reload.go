package agent

import (
	"context"
	"encoding/json"
	"maps"
	"path/filepath"
	"reflect"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/statefile"
	"chandler.dev/discovery"
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

// keepConfig saves the configuration in force, until the context ends.
func (a *agent) keepConfig(ctx context.Context) {
	memoOf := func(name string) *statefile.File {
		return statefile.Open(ctx, a.files(), filepath.Join(a.StateDir, name), func([]byte) error { return nil })
	}
	config, labels := memoOf(KeptConfig), memoOf(KeptLabels)
	for ctx.Err() == nil {
		settings := a.settings.Load()
		if settings.Text != nil {
			config.Write(ctx, settings.Text)
		}
		if data, err := json.Marshal(settings.Labels); err == nil && settings.Labels != nil { // Marshal cannot fail here
			labels.Write(ctx, data)
		}
		waitFor(ctx, a.settingsChanged, keepInterval)
	}
}

// followChanges puts changed settings in force until the context ends. If a configuration is
// invalid, the previous one stays in force.
func (a *agent) followChanges(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case change := <-a.Changes:
			a.applyChange(ctx, change)
		}
	}
}

func (a *agent) applyChange(ctx context.Context, change Change) {
	a.metrics.RecordReload(change.Err)
	replace(a.configReports, change.Err)
	if change.Err != nil {
		a.configFailure.Store(&change.Err)
		klog.FromContext(ctx).Error(change.Err, "The new configuration is invalid; the previous one remains in effect")
		return
	}
	a.configFailure.Store(nil)
	before := a.settings.Swap(&change.Settings)
	notify(a.settingsChanged)
	notify(a.labelsChanged)
	if before == &a.Settings {
		close(a.firstValid)
	}
	if change.Settings.Rules == before.Rules {
		return // the node's labels changed, but no setting depends on them
	}
	klog.FromContext(ctx).Info("The configuration changed")
	a.warnOutdated(ctx)
	replace(a.rulesChanged, change.Settings.Rules)
	a.requestScan() // to settle the states of devices by the new severity
}

// outdatedFields returns the changed fields of the configuration that need a restart of the agent.
func (a *agent) outdatedFields() (fields []string) {
	started, now := &a.Settings, a.settings.Load()
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
func (a *agent) warnOutdated(ctx context.Context) {
	fields := a.outdatedFields()
	a.metrics.RecordOutdated(len(fields) > 0)
	if len(fields) > 0 {
		klog.FromContext(ctx).Info("Warning: the configuration changed in what is in force only once the agent is started again; all else is in force now", "fields", fields)
	}
}

// stillWrong returns the error in the configuration. It returns nil if the configuration at the
// start was valid, or if a valid one has arrived since.
func (a *agent) stillWrong() error {
	if a.settings.Load() != &a.Settings || a.ConfigError == nil {
		return nil
	}
	if since := a.configFailure.Load(); since != nil {
		return *since
	}
	return a.ConfigError
}

// configError returns the error that prevents the newest configuration from taking effect, nil if
// it is in force.
func (a *agent) configError() error {
	if why := a.configFailure.Load(); why != nil {
		return *why
	}
	return a.stillWrong()
}

// complainInterval is the time until an Event is retried.
const complainInterval = 10 * time.Second

// reportInvalid reports an invalid configuration in Events of the agent's own pod.
func (a *agent) reportInvalid(ctx context.Context) {
	namespace, name, isPod := strings.Cut(a.Pod, "/")
	if !isPod {
		return
	}
	pod := podevents.Pod{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}, UID: a.PodUID}
	var again <-chan time.Time
	var wrong error
	for {
		select {
		case <-ctx.Done():
			return
		case wrong = <-a.configReports:
		case <-again:
		}
		again = nil
		if wrong == nil {
			continue
		}
		if err := podevents.TellOfConfig(ctx, a.StatusClient, a.NodeName, &pod, wrong); err != nil {
			klog.FromContext(ctx).V(2).Info("The Event about the configuration is not written yet", "reason", err.Error())
			again = time.After(complainInterval)
		}
	}
}
