package agent

import (
	"context"
	"reflect"

	"k8s.io/klog/v2"
)

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
	if change.Err != nil {
		klog.FromContext(ctx).Error(change.Err, "The configuration changed and is wrong; the one before stays in force")
		return
	}
	klog.FromContext(ctx).Info("The configuration changed")
	if !reflect.DeepEqual(change.Settings.Roots, a.Settings.Roots) || !reflect.DeepEqual(change.Settings.Paths, a.Settings.Paths) {
		klog.FromContext(ctx).Info("Warning: roots and paths of the configuration changed; they are in force once the agent is started again, and all else is now")
	}
	a.settings.Store(&change.Settings)
	replace(a.rules, change.Settings.Rules)
	notify(a.events) // to settle the states of devices by the new severity
}
