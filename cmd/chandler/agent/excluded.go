package agent

import (
	"context"
	"errors"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/internal/podevents"
)

// leftAloneInterval is how often the agent checks for consumers on a node that is left alone.
const leftAloneInterval = 10 * time.Second

// warnLeftAlone warns, until the context ends, if the node has the label that excludes agents while
// devices are allocated. The chart's DaemonSet then deletes the agent's pod, and the pods of claims
// cannot end until an agent unprepares the claims.
func (a *agent) warnLeftAlone(ctx context.Context) {
	lastWarning := ""
	for ; ctx.Err() == nil; waitFor(ctx, a.settings.labelsChanged, leftAloneInterval) {
		consumers := ""
		if a.settings.inForce().LeftAlone {
			owners, _ := a.ledger.View(nil).Owners()
			consumers = namesOf(owners)
		}
		if consumers != lastWarning && consumers != "" {
			a.reportLeftAlone(ctx, consumers)
		}
		lastWarning = consumers
	}
}

// reportLeftAlone logs the warning, and creates an Event for the agent's own pod. The context may end
// at any moment, because the DaemonSet deletes the pod.
func (a *agent) reportLeftAlone(ctx context.Context, consumers string) {
	wrong := errors.New("the node has the label chandler.dev/agent=off, but devices are allocated to " + consumers +
		"; without an agent, pods with claims cannot end: remove the label, drain the node, and set the label again")
	klog.FromContext(ctx).Error(wrong, "The agent must not leave this node yet")
	namespace, name, isPod := strings.Cut(a.Pod, "/")
	if !isPod {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cluster.AskTimeout)
	defer cancel()
	pod := podevents.Pod{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}, UID: a.PodUID}
	if err := podevents.TellOfLabel(ctx, a.StatusClient, a.NodeName, &pod, wrong); err != nil {
		klog.FromContext(ctx).V(2).Info("The Event about the label is not written", "reason", err.Error())
	}
}
