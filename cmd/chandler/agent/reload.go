package agent

import (
	"context"
	"encoding/json"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/internal/podevents"
)

// KeptConfig is the file, in the agent's directory, of the last configuration that was
// right. An agent that starts with a wrong one goes on with it.
const KeptConfig = "config.yaml"

// KeptLabels is the file, in the agent's directory, of the labels of the node that are in
// force. An agent that starts goes by them until it hears others, so that a start
// without an API server changes nothing.
const KeptLabels = "labels.json"

// keepConfig keeps the configuration that is in force, until the context ends.
func (a *agent) keepConfig(ctx context.Context) {
	memoOf := func(name string) *memo {
		return openMemo(ctx, a.files(), filepath.Join(a.StateDir, name), func([]byte) error { return nil })
	}
	config, labels := memoOf(KeptConfig), memoOf(KeptLabels)
	for ctx.Err() == nil {
		settings := a.settings.Load()
		if settings.Text != nil {
			config.write(ctx, settings.Text)
		}
		if data, err := json.Marshal(settings.Labels); err == nil && settings.Labels != nil { // always
			labels.write(ctx, data)
		}
		waitFor(ctx, a.accepted, quietInterval)
	}
}

// follow puts changed settings in force until the context ends. If a configuration
// is wrong, the one before stays.
func (a *agent) follow(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case change := <-a.Changes:
			a.change(ctx, change)
		}
	}
}

func (a *agent) change(ctx context.Context, change Change) {
	a.metrics.reloaded(change.Err)
	replace(a.wrong, change.Err)
	if change.Err != nil {
		a.because.Store(&change.Err)
		klog.FromContext(ctx).Error(change.Err, "The configuration changed and is wrong; the one before stays in force")
		return
	}
	a.because.Store(nil)
	before := a.settings.Swap(&change.Settings)
	notify(a.accepted)
	if before == &a.Settings {
		close(a.righted)
	}
	if change.Settings.Rules == before.Rules {
		return // the node has other labels, and nothing goes by them
	}
	klog.FromContext(ctx).Info("The configuration changed")
	if !reflect.DeepEqual(change.Settings.Roots, a.Settings.Roots) || !reflect.DeepEqual(change.Settings.Paths, a.Settings.Paths) || change.Settings.NoHooks != a.Settings.NoHooks {
		klog.FromContext(ctx).Info("Warning: roots, paths or hooks of the configuration changed; they are in force once the agent is started again, and all else is now")
	}
	if !slices.EqualFunc(change.Settings.Rebind, a.Settings.Rebind, discovery.SameRebinding) {
		klog.FromContext(ctx).Info("Warning: rebinding of the configuration changed; it is in force once the agent is started again")
	}
	if change.Settings.Pools && !a.Settings.Pools {
		klog.FromContext(ctx).Info("Warning: the configuration has pools of the SR-IOV plugin now; physical functions that the kernel drives are offered in them once the agent is started again")
	}
	replace(a.rules, change.Settings.Rules)
	notify(a.events) // to settle the states of devices by the new severity
}

// stillWrong returns why the configuration is wrong, nil if that with which the agent
// started was not, or a right one has come since.
func (a *agent) stillWrong() error {
	if a.settings.Load() != &a.Settings || a.Wrong == nil {
		return nil
	}
	if since := a.because.Load(); since != nil {
		return *since
	}
	return a.Wrong
}

// unaccepted returns why the newest configuration is not in force, nil if it is.
func (a *agent) unaccepted() error {
	if why := a.because.Load(); why != nil {
		return *why
	}
	return a.stillWrong()
}

// complainInterval is how long until an Event is tried again.
const complainInterval = 10 * time.Second

// complain tells the agent's own pod, by Events, why the configuration is wrong.
func (a *agent) complain(ctx context.Context) {
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
		case wrong = <-a.wrong:
		case <-again:
		}
		again = nil
		if wrong == nil {
			continue
		}
		if err := podevents.TellOfConfig(ctx, a.StatusClient, a.NodeName, &pod, wrong); err != nil {
			klog.FromContext(ctx).V(2).Info("The agent's pod is not told of its configuration yet", "reason", err.Error())
			again = time.After(complainInterval)
		}
	}
}
