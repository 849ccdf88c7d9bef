package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/driver/publish"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/removal"
)

// reportInterval is how often an agent with an order checks whether its report has changed.
const reportInterval = time.Second

// cleanPatience is how long the agent may take to clean the node.
const cleanPatience = 30 * time.Second

// errLeave ends the parts of the agent when Chandler is removed from the node.
var errLeave = errors.New("the agent leaves the node")

// orderState is an order and the last report.
type orderState struct {
	order      removal.Order
	expires    time.Time // when an order to withhold ends unless it is renewed
	lastReport removal.Report
}

// removalOrders follows the orders to remove Chandler from the node.
type removalOrders struct {
	config      *Config
	ledger      *ledger.Ledger
	placed      func() *placement.Placed  // nil before devices are placed
	pendingUndo func(*ledger.View) string // the first change of a device that is not undone yet, or ""

	order   atomic.Pointer[removal.Order] // the last order, nil before the first
	changed chan struct{}                 // has a value when the order changed
}

// follow withholds all devices while an order is in force, and reports the progress. It returns
// [errLeave] once an order to remove Chandler is in force and no device is allocated.
func (o *removalOrders) follow(ctx context.Context) error {
	var state orderState
	for {
		var tick <-chan time.Time
		if state.order.Phase != removal.None || state.lastReport.State != "" && state.lastReport.State != removal.Offering {
			tick = time.After(reportInterval)
		}
		select {
		case <-ctx.Done():
			return nil
		case order := <-o.config.Orders:
			klog.FromContext(ctx).Info("Removal of Chandler", "order", cmp.Or(order.String(), "none"))
			state.order, state.expires = order, time.Now().Add(removal.Patience)
		case <-tick:
		}
		if state.order.Phase == removal.Withhold && time.Now().After(state.expires) {
			klog.FromContext(ctx).Info("The order to withhold everything was not renewed; it is in force no longer", "order", state.order.String())
			state.order = removal.Order{}
		}
		order := state.order
		if before := o.order.Swap(&order); before == nil || *before != order {
			notify(o.changed)
		}
		report := o.reportOn(state.order)
		o.sendReport(ctx, &state, report)
		if state.order.Phase == removal.Remove && report.State == removal.Withheld {
			return errLeave
		}
	}
}

// leavingReason returns why all devices are withheld, or "" without an order.
func (o *removalOrders) leavingReason() string {
	if order := o.order.Load(); order != nil && order.Phase != removal.None {
		return "Chandler is being removed"
	}
	return ""
}

// reportOn returns the report for an order.
func (o *removalOrders) reportOn(order removal.Order) removal.Report {
	r := removal.Report{ID: order.ID, State: removal.Offering}
	if order.Phase == removal.None {
		return r
	}
	if p := o.placed(); p == nil || !p.IsLeaving {
		r.State, r.Detail = removal.Waiting, "not everything is withheld yet"
		return r
	}
	view := o.ledger.View(nil)
	owners, ending := view.Owners()
	switch {
	case len(owners) > 0:
		r.State, r.Detail = removal.InUse, namesOf(owners)
	case len(ending) > 0:
		r.State, r.Detail = removal.Waiting, "the kubelet has just ended "+namesOf(ending)
	default:
		if r.State, r.Detail = removal.Withheld, o.pendingUndo(view); r.Detail != "" {
			r.State = removal.Waiting
		}
	}
	return r
}

// namesOf joins the names of owners, at most maxNames.
func namesOf(owners []allocation.Owner) string {
	var names []string
	for _, owner := range owners {
		name := owner.String()
		if owner.API == discovery.ModeDevicePlugin && owner.Name != "" {
			name = fmt.Sprintf("pod %s/%s", owner.Namespace, owner.Name)
		}
		names = append(names, name)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	if more := len(names) - maxNames; more > 0 {
		names = append(names[:maxNames], fmt.Sprintf("%d more", more))
	}
	return strings.Join(names, ", ")
}

// maxNames is the maximum number of owners in a report.
const maxNames = 20

// sendReport sends a report that differs from the last one. After an error, the next tick sends it
// again.
func (o *removalOrders) sendReport(ctx context.Context, state *orderState, r removal.Report) {
	if r == state.lastReport || r.State == removal.Offering && state.lastReport.State == "" {
		return
	}
	namespace, name, _ := strings.Cut(o.config.Pod, "/")
	if err := removal.Tell(ctx, o.config.StatusClient, namespace, name, r); err != nil {
		klog.FromContext(ctx).Info("The order of removal is not answered yet", "state", r.State, "reason", err.Error())
		return
	}
	state.lastReport = r
}

// leave removes the agent's data from the node and the API server, after the parts of the agent
// have ended, and waits until the agent's pod is deleted. If a device was allocated before the
// parts had ended, or if the order is withdrawn, leave returns an error: the next process
// offers all devices again.
func (o *removalOrders) leave(ctx context.Context) error {
	report := removal.Report{ID: o.order.Load().ID, State: removal.Removed}
	if owners, ending := o.ledger.View(nil).Owners(); len(owners)+len(ending) > 0 {
		return fmt.Errorf("a device was allocated meanwhile, %s: %w", namesOf(slices.Concat(owners, ending)), errWithdrawn)
	}
	cleaning, cancel := context.WithTimeout(ctx, cleanPatience)
	err := o.clean(cleaning)
	cancel()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Chandler is not removed")
		report.State, report.Detail = removal.Failed, err.Error()
	} else {
		klog.FromContext(ctx).Info("Nothing of Chandler is left on the node but this pod")
	}
	serving, end := context.WithCancel(ctx)
	defer end()
	if o.config.Serve != nil {
		well := func(context.Context) error { return nil }
		go func() {
			if err := o.config.Serve(serving, healthMux(o.config.Version, well, well)); err != nil {
				klog.FromContext(ctx).Error(err, "Probes of the pod are not answered")
			}
		}()
	}
	return o.repeatReport(ctx, report)
}

// repeatReport repeats the report until the pod is deleted, or returns errWithdrawn after another order.
func (o *removalOrders) repeatReport(ctx context.Context, report removal.Report) error {
	state := orderState{order: *o.order.Load()}
	for {
		o.sendReport(ctx, &state, report)
		select {
		case <-ctx.Done():
			return nil
		case order := <-o.config.Orders:
			if order.Phase != removal.Remove || order.ID != report.ID {
				return fmt.Errorf("the order to remove Chandler was taken back: %w", errWithdrawn)
			}
		case <-time.After(reportInterval):
		}
	}
}

var errWithdrawn = errors.New("starting again")

// clean removes the data that outlives an agent: ResourceSlices, files for the next agent, CDI
// specs, the feature file, and sockets without a listener.
func (o *removalOrders) clean(ctx context.Context) error {
	errs := []error{o.deleteSlices(ctx)}
	files := o.config.files()
	removeAll := func(dir, prefix string) {
		entries, err := files.ListDir(dir)
		errs = append(errs, err)
		for _, entry := range entries {
			if strings.HasPrefix(entry.Name(), prefix) {
				errs = append(errs, files.Remove(filepath.Join(dir, entry.Name())))
			}
		}
	}
	if o.config.FeatureDir != "" {
		errs = append(errs, files.Remove(filepath.Join(o.config.FeatureDir, featureName)))
	}
	removeAll(o.config.CDI.Path, discovery.Domain+"-")
	removeAll(filepath.Join(o.config.KubeletRoot, "plugins_registry"), discovery.Domain+"-")
	errs = append(errs, files.RemoveAll(o.config.StateDir), o.cleanRunDir(files))
	return errors.Join(errs...)
}

// cleanRunDir empties the directory on tmpfs. The directory itself is a mount point and remains.
func (o *removalOrders) cleanRunDir(files disk.Files) error {
	entries, err := files.ListDir(o.config.RunDir)
	errs := []error{err}
	for _, entry := range entries {
		errs = append(errs, files.RemoveAll(filepath.Join(o.config.RunDir, entry.Name())))
	}
	return errors.Join(errs...)
}

// deleteSlices deletes the ResourceSlices of the node, including the taints of devices.
func (o *removalOrders) deleteSlices(ctx context.Context) error {
	client := draclient.New(o.config.Client).ResourceSlices()
	list, err := client.List(ctx, metav1.ListOptions{FieldSelector: publish.SelectSlices(o.config.NodeName)})
	if apierrors.IsNotFound(err) { // an API server without DRA
		return nil
	}
	if err != nil {
		return fmt.Errorf("list slices: %w", err)
	}
	var errs []error
	for i := range list.Items {
		if err := client.Delete(ctx, list.Items[i].Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("delete slice: %w", err))
		}
	}
	return errors.Join(errs...)
}
