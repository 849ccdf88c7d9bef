// Package podevents notifies pods by Events when one of their devices becomes unusable, and
// when the device recovers. Kubernetes itself does so for some pods only: for a pod with an
// extended resource served by DRA, the kubelet reports nothing in the pod's status, and no
// taint evicts the pod (kubernetes/kubernetes#141290). The package is independent of the
// allocation API, and has no health rules of its own.
package podevents

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

const (
	// lookInterval is the time between two checks of the allocations, which need no request.
	lookInterval = 10 * time.Second

	// changePause is the delay between a change and the next check. The kernel removes a driver
	// and its objects in several steps, and a scan may see an intermediate step. Pods are notified
	// of the final state.
	changePause = 2 * time.Second

	// unknownInterval is the time between two checks while the allocations are unknown.
	unknownInterval = time.Second

	// listInterval is the time after which the pods are listed again while any notice may be due:
	// claims are shared, and new pods may replace pods of the same name.
	listInterval = 5 * time.Minute

	// createTimeout limits the time for the creation of one Event.
	createTimeout = 10 * time.Second
)

// Notifier sends notices to pods about their devices. All fields except Files must be set.
type Notifier struct {
	// Client creates the Events. Give the client a rate limit of its own, so that Events do not
	// delay other requests.
	Client kubernetes.Interface

	Node string // the name of the node
	File string // the record of sent notices, which prevents repetition after a restart

	// Files writes File. The zero value is ready to use.
	Files disk.Files

	// InUse returns the allocated devices in a stable order, and whether the allocations are known
	// yet.
	InUse func() (devices []Device, known bool)

	// Pods returns the node's pods that have not terminated, from the API server.
	Pods func(ctx context.Context) ([]Pod, error)

	sent           map[key]state
	lastSaved      []byte
	lastDevices    []Device      // the unusable devices at the last check
	lastListing    time.Time     // the time of the last request for the pods
	repeatInterval time.Duration // the time from lastListing to the next request
	retry          time.Duration // the next value of repeatInterval if the next check fails

	failing map[string]bool // namespaces with a failed Event at the last check
}

// Run checks the devices until ctx is done: after each value received from changed, and at
// intervals. If the API server rejects an Event, Run tries again while the notice is still due.
func (t *Notifier) Run(ctx context.Context, changed <-chan struct{}) {
	t.load(ctx)
	for {
		wait := unknownInterval
		if devices, known := t.InUse(); known {
			wait = lookInterval
			if err := t.sendDue(ctx, devices); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).V(2).Info("Events for pods are not written yet", "reason", err.Error())
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		case <-changed:
			select {
			case <-ctx.Done():
				return
			case <-time.After(changePause):
			}
		}
	}
}

// sendDue sends the due notices. It requests the pods only if a notice may be due, and after a
// failure at longer and longer intervals while the devices stay the same.
func (t *Notifier) sendDue(ctx context.Context, devices []Device) error {
	sick := slices.DeleteFunc(slices.Clone(devices), func(d Device) bool { return d.Health.IsUsable() })
	quiet := len(sick) == 0 && len(t.sent) == 0
	if quiet || slices.EqualFunc(sick, t.lastDevices, sameState) && time.Since(t.lastListing) < t.repeatInterval {
		return nil
	}
	pods, err := t.Pods(ctx)
	if err == nil {
		t.forgetDeleted(pods)
		err = t.tellAll(ctx, dueNotices(t.sent, devices, pods, time.Now()))
		t.saveSent(ctx)
	}
	t.lastDevices, t.lastListing = sick, time.Now()
	if err == nil {
		t.repeatInterval, t.retry = listInterval, lookInterval
	} else {
		t.repeatInterval, t.retry = t.retry, min(2*t.retry, listInterval)
	}
	return err
}

// tellAll sends the due notices by namespace. If an Event fails, for example because of a
// webhook of the namespace, the namespace's other notices are postponed to the next check,
// since each failure may take as long. Namespaces that failed at the last check come last, so
// they do not delay the others.
func (t *Notifier) tellAll(ctx context.Context, notices []notice) error {
	slices.SortStableFunc(notices, func(a, b notice) int {
		return cmp.Compare(namespaceOrder(t.failing[a.pod.Namespace]), namespaceOrder(t.failing[b.pod.Namespace]))
	})
	failing := make(map[string]bool)
	var errs []error
	for _, n := range notices {
		if failing[n.pod.Namespace] {
			continue
		}
		if err := t.tell(ctx, &n); err != nil {
			failing[n.pod.Namespace] = true
			errs = append(errs, err)
		}
	}
	t.failing = failing
	return errors.Join(errs...)
}

// namespaceOrder returns the sort key of a namespace: failing namespaces come last.
func namespaceOrder(failing bool) int {
	if failing {
		return 1
	}
	return 0
}

// sameState reports whether two devices lead to the same notices for the same pods. A
// different reason alone does not lead to another notice.
func sameState(a, b Device) bool {
	return a.Name == b.Name && a.Health.Key() == b.Health.Key() && a.Health.Since.Equal(&b.Health.Since) &&
		slices.Equal(a.Claims, b.Claims) && slices.Equal(a.Pods, b.Pods)
}

// forgetDeleted removes the sent notices of deleted pods. A device that temporarily seems to be
// unallocated is not forgotten.
func (t *Notifier) forgetDeleted(pods []Pod) {
	present := make(map[types.UID]bool, len(pods))
	for _, pod := range pods {
		present[pod.UID] = true
	}
	maps.DeleteFunc(t.sent, func(k key, _ state) bool { return !present[k.pod] })
}

// tell sends a notice.
func (t *Notifier) tell(ctx context.Context, n *notice) error {
	if err := create(ctx, t.Client, n.newEvent(t.Node, time.Now())); err != nil {
		return err
	}
	if n.device.Health.IsUsable() {
		delete(t.sent, n.key())
	} else {
		t.sent[n.key()] = n.state
	}
	return nil
}

// create creates an Event. A permanent rejection, as in a namespace under deletion, is logged
// and is not an error.
func create(ctx context.Context, client kubernetes.Interface, event *eventsv1.Event) error {
	ctx, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	_, err := client.EventsV1().Events(event.Namespace).Create(ctx, event, metav1.CreateOptions{})
	pod := event.Regarding
	switch {
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsNotFound(err):
		klog.FromContext(ctx).Error(err, "An Event for a pod cannot be written", "pod", klog.KRef(pod.Namespace, pod.Name), "reason", event.Reason, "note", event.Note)
	case err != nil && !apierrors.IsAlreadyExists(err):
		return fmt.Errorf("create Event for pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}

// entry is the record of a sent notice.
type entry struct {
	Pod       types.UID           `json:"pod"`
	Device    string              `json:"device"`
	Condition discovery.Condition `json:"condition"`
	Since     metav1.Time         `json:"since"`
}

// load reads the sent notices from File. If the file is unreadable, some notices may be
// repeated.
func (t *Notifier) load(ctx context.Context) {
	t.sent, t.retry = make(map[key]state), lookInterval
	data, err := t.Files.Read(t.File)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var entries []entry
	if err == nil {
		err = json.Unmarshal(data, &entries)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "The record of Events for pods is lost; some may be written again")
		return
	}
	t.lastSaved = data
	for _, e := range entries {
		t.sent[key{e.Pod, e.Device}] = state{e.Condition, e.Since.Unix()}
	}
}

// saveSent writes the sent notices to File if they have changed.
func (t *Notifier) saveSent(ctx context.Context) {
	entries := make([]entry, 0, len(t.sent))
	for k, s := range t.sent {
		entries = append(entries, entry{k.pod, k.device, s.condition, metav1.Unix(s.since, 0)})
	}
	slices.SortFunc(entries, func(a, b entry) int {
		return cmp.Or(strings.Compare(string(a.Pod), string(b.Pod)), strings.Compare(a.Device, b.Device))
	})
	data, err := json.Marshal(entries)
	if err != nil || bytes.Equal(data, t.lastSaved) {
		return
	}
	if _, err := t.Files.Write(t.File, data, 0o600); err != nil {
		klog.FromContext(ctx).Error(err, "Recording the Events for pods")
		return
	}
	t.lastSaved = data
}
