package main

import (
	"context"
	"io/fs"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/scan"
)

// interfacesInterval is the interval between comparisons of network interface names, where the
// kernel's events about interfaces do not reach the agent.
const interfacesInterval = time.Second

// receiveEvents returns a function that receives the kernel's events. If events about the host's
// network interfaces do not reach the agent, the function compares their names instead. recoveries
// receives the results of error recoveries.
func receiveEvents(host fs.FS, recoveries *scan.Recoveries) func(ctx context.Context, events chan scan.Changes) error {
	return func(ctx context.Context, events chan scan.Changes) error {
		if hostfs.HasSys(host) && !scan.SharesNetwork(host) {
			klog.FromContext(ctx).Info("The agent is not in the host's network namespace and receives no events of network interfaces; it compares their names instead", "interval", interfacesInterval)
			ctx, cancel := context.WithCancel(ctx)
			ended := make(chan struct{})
			defer func() { cancel(); <-ended }()
			go func() {
				defer close(ended)
				scan.FollowInterfaces(ctx, host, interfacesInterval, events)
			}()
		}
		return scan.Listen(ctx, events, recoveries)
	}
}
