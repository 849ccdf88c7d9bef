package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/ledger"
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

// followOrders withholds all devices while an order is in force, and reports the progress. It
// returns [errLeave] once an order to remove Chandler is in force and no device is allocated.
func (a *agent) followOrders(ctx context.Context) error {
	var o orderState
	for {
		var tick <-chan time.Time
		if o.order.Phase != removal.None || o.lastReport.State != "" && o.lastReport.State != removal.Offering {
			tick = time.After(reportInterval)
		}
		select {
		case <-ctx.Done():
			return nil
		case order := <-a.Orders:
			klog.FromContext(ctx).Info("Removal of Chandler", "order", cmp.Or(order.String(), "none"))
			o.order, o.expires = order, time.Now().Add(removal.Patience)
		case <-tick:
		}
		if o.order.Phase == removal.Withhold && time.Now().After(o.expires) {
			klog.FromContext(ctx).Info("The order to withhold everything was not renewed; it is in force no longer", "order", o.order.String())
			o.order = removal.Order{}
		}
		order := o.order
		if before := a.removalOrder.Swap(&order); before == nil || *before != order {
			notify(a.orderChanged)
		}
		report := a.removalReport(o.order)
		a.sendReport(ctx, &o, report)
		if o.order.Phase == removal.Remove && report.State == removal.Withheld {
			return errLeave
		}
	}
}

// leavingReason returns why all devices are withheld, or "" without an order.
func (a *agent) leavingReason() string {
	if o := a.removalOrder.Load(); o != nil && o.Phase != removal.None {
		return "Chandler is being removed"
	}
	return ""
}

// removalReport returns the report for an order.
func (a *agent) removalReport(o removal.Order) removal.Report {
	r := removal.Report{ID: o.ID, State: removal.Offering}
	if o.Phase == removal.None {
		return r
	}
	if p := a.placedDevices.Load(); p == nil || !p.IsLeaving {
		r.State, r.Detail = removal.Waiting, "not everything is withheld yet"
		return r
	}
	view := a.ledger.View(nil)
	owners, ending := view.Owners()
	switch {
	case len(owners) > 0:
		r.State, r.Detail = removal.InUse, namesOf(owners)
	case len(ending) > 0:
		r.State, r.Detail = removal.Waiting, "the kubelet has just ended "+namesOf(ending)
	case len(a.passthrough.LeftUnits()) > 0:
		left := a.passthrough.LeftUnits()[0]
		r.State, r.Detail = removal.Waiting, withReason(fmt.Sprintf("device %s is not returned to its driver yet", left.Devices[0]), view.KeptReason(left.Devices...), left.Err)
	case len(a.onDemand.CreatedUnits()) > 0:
		made := a.onDemand.CreatedUnits()[0]
		r.State, r.Detail = removal.Waiting, withReason(fmt.Sprintf("%s was created on demand and is not removed yet", made.Unit), view.KeptReason(made.Devices...), made.Err)
	default:
		r.State = removal.Withheld
	}
	return r
}

// withReason appends to the text of a pending step which consumer delays it, or its last error.
func withReason(text, kept string, failed error) string {
	switch {
	case kept != "":
		return text + ": it is in use by " + kept
	case failed != nil:
		return text + ": " + failed.Error()
	}
	return text
}

// namesOf joins the names of owners, at most maxNames.
func namesOf(owners []ledger.Owner) string {
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
func (a *agent) sendReport(ctx context.Context, o *orderState, r removal.Report) {
	if r == o.lastReport || r.State == removal.Offering && o.lastReport.State == "" {
		return
	}
	if err := a.tell(ctx, r); err != nil {
		klog.FromContext(ctx).Info("The order of removal is not answered yet", "state", r.State, "reason", err.Error())
		return
	}
	o.lastReport = r
}

func (a *agent) tell(ctx context.Context, r removal.Report) error {
	namespace, name, _ := strings.Cut(a.Pod, "/")
	return removal.Tell(ctx, a.StatusClient, namespace, name, r)
}

// leaveNode removes the agent's data from the node and the API server, after the parts of the agent
// have ended, and waits until the agent's pod is deleted. If a device was allocated before the
// parts had ended, or if the order is withdrawn, leaveNode returns an error: the next process
// offers all devices again.
func (a *agent) leaveNode(ctx context.Context) error {
	report := removal.Report{ID: a.removalOrder.Load().ID, State: removal.Removed}
	if owners, ending := a.ledger.View(nil).Owners(); len(owners)+len(ending) > 0 {
		return fmt.Errorf("a device was allocated meanwhile, %s: %w", namesOf(slices.Concat(owners, ending)), errWithdrawn)
	}
	cleaning, cancel := context.WithTimeout(ctx, cleanPatience)
	err := a.clean(cleaning)
	cancel()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Chandler is not removed")
		report.State, report.Detail = removal.Failed, err.Error()
	} else {
		klog.FromContext(ctx).Info("Nothing of Chandler is left on the node but this pod")
	}
	serving, end := context.WithCancel(ctx)
	defer end()
	if a.Serve != nil {
		well := func(context.Context) error { return nil }
		go func() {
			if err := a.Serve(serving, healthMux(a.Version, well, well)); err != nil {
				klog.FromContext(ctx).Error(err, "Probes of the pod are not answered")
			}
		}()
	}
	return a.repeatReport(ctx, report)
}

// repeatReport repeats the report until the pod is deleted, or returns errWithdrawn after another order.
func (a *agent) repeatReport(ctx context.Context, report removal.Report) error {
	o := orderState{order: *a.removalOrder.Load()}
	for {
		a.sendReport(ctx, &o, report)
		select {
		case <-ctx.Done():
			return nil
		case order := <-a.Orders:
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
func (a *agent) clean(ctx context.Context) error {
	errs := []error{a.deleteSlices(ctx)}
	files := a.files()
	removeAll := func(dir, prefix string) {
		entries, err := files.ListDir(dir)
		errs = append(errs, err)
		for _, entry := range entries {
			if strings.HasPrefix(entry.Name(), prefix) {
				errs = append(errs, files.Remove(filepath.Join(dir, entry.Name())))
			}
		}
	}
	if a.FeatureDir != "" {
		errs = append(errs, files.Remove(filepath.Join(a.FeatureDir, featureName)))
	}
	removeAll(a.CDI.Path, discovery.Domain+"-")
	removeAll(filepath.Join(a.KubeletRoot, "plugins_registry"), discovery.Domain+"-")
	errs = append(errs, files.RemoveAll(a.StateDir), a.cleanRunDir(files))
	return errors.Join(errs...)
}

// cleanRunDir empties the directory on tmpfs. The directory itself is a mount point and remains.
func (a *agent) cleanRunDir(files disk.Files) error {
	entries, err := files.ListDir(a.RunDir)
	errs := []error{err}
	for _, entry := range entries {
		errs = append(errs, files.RemoveAll(filepath.Join(a.RunDir, entry.Name())))
	}
	return errors.Join(errs...)
}

// deleteSlices deletes the ResourceSlices of the node, including the taints of devices.
func (a *agent) deleteSlices(ctx context.Context) error {
	client := draclient.New(a.Client).ResourceSlices()
	list, err := client.List(ctx, metav1.ListOptions{
		FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + discovery.Domain + "," + resourceapi.ResourceSliceSelectorNodeName + "=" + a.NodeName,
	})
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
