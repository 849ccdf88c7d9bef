package agent

import (
	"context"
	"time"

	"k8s.io/klog/v2"
)

// runtimeInterval is the time until the node's status is requested again after a failure.
const runtimeInterval = time.Minute

// checkRuntime warns if the container runtime does not read CDI specs, because pods then start
// without the devices of their claims. It checks once, when DRA offers devices.
func (a *agent) checkRuntime(ctx context.Context) {
	if a.CDIEnabled == nil {
		return
	}
	for ctx.Err() == nil {
		interval := time.Second
		if offered, known := a.offeredDevices(); known && len(offered) > 0 {
			runtime, err := a.cluster.Runtime(ctx)
			if err == nil {
				a.reportRuntime(ctx, runtime)
				return
			}
			klog.FromContext(ctx).V(2).Info("The container runtime is not known yet", "reason", err)
			interval = runtimeInterval
		}
		waitFor(ctx, nil, interval)
	}
}

func (a *agent) reportRuntime(ctx context.Context, runtime string) {
	switch on, err := a.CDIEnabled(runtime); {
	case err != nil:
		klog.FromContext(ctx).Info("It is not known whether the container runtime reads CDI specs; run chandler doctor on the node", "runtime", runtime, "reason", err)
	case !on:
		klog.FromContext(ctx).Info("Warning: the container runtime does not read CDI specs; pods with claims start without their devices", "runtime", runtime, "explanation", "chandler explain CH0202")
	default:
		klog.FromContext(ctx).V(2).Info("The container runtime reads CDI specs", "runtime", runtime)
	}
}
