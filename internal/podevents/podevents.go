// Package podevents tells pods, by Events, when a device that they have becomes
// one that cannot be used, and when it can be used again. Kubernetes itself says
// so to some only: of pods that have a device by limits which DRA serves, the
// kubelet says nothing in their status and no taint evicts them
// (kubernetes/kubernetes#141290). It knows neither of the APIs by which pods have
// devices, and has no rule of its own for when one is well.
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
	// lookInterval is the time between looks at who has what, which asks nobody.
	lookInterval = 10 * time.Second

	// changePause is between a change and the look at it. The kernel takes a driver
	// away, and all that the driver made, step by step, and a scan may see a step: pods
	// are told where that led.
	changePause = 2 * time.Second

	// unknownInterval is that time while it is not known who has what.
	unknownInterval = time.Second

	// listInterval is the time after which it is asked again which pods there
	// are, while there is something that they may have to be told: claims are
	// shared, and pods are replaced by others of their name.
	listInterval = 5 * time.Minute

	// createTimeout bounds what the API server takes for one Event.
	createTimeout = 10 * time.Second
)

// Teller tells pods of their devices. All its fields must be set but Files.
type Teller struct {
	// Client writes the Events. It should have a limit of its own, so that
	// nothing else waits for it.
	Client kubernetes.Interface

	Node string // the name of the node
	File string // where it writes down what it has told, so that a restart repeats nothing

	// Files writes the File. Its zero value is the one to use.
	Files disk.Files

	// InUse returns the devices that pods have, in the same order each time, and
	// whether that is known yet.
	InUse func() (devices []Device, known bool)

	// Pods asks the API server for the node's pods that have not ended.
	Pods func(ctx context.Context) ([]Pod, error)

	told   map[key]state
	saved  []byte
	looked []Device      // what could not be used at the last look
	listed time.Time     // when pods were last asked for
	again  time.Duration // how long after that they are asked for again
	retry  time.Duration // what again is to be if the next look fails

	failing map[string]bool // namespaces whose Events could not be written at the last look
}

// Run tells until the context ends. It looks when something is put into changed,
// and now and then. An event that the API server refused is tried again, while it
// is still true.
func (t *Teller) Run(ctx context.Context, changed <-chan struct{}) {
	t.load(ctx)
	for {
		wait := unknownInterval
		if devices, known := t.InUse(); known {
			wait = lookInterval
			if err := t.look(ctx, devices); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).V(2).Info("Pods are not told of their devices yet", "reason", err.Error())
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

// look tells what is due. It asks the API server only if there may be something.
func (t *Teller) look(ctx context.Context, devices []Device) error {
	sick := slices.DeleteFunc(slices.Clone(devices), func(d Device) bool { return d.Health.Usable() })
	quiet := len(sick) == 0 && len(t.told) == 0
	if quiet || slices.EqualFunc(sick, t.looked, sameState) && time.Since(t.listed) < t.again {
		return nil
	}
	pods, err := t.Pods(ctx)
	if err != nil {
		return err
	}
	t.forget(pods)
	notices := due(t.told, devices, pods, time.Now())
	err = t.tellAll(ctx, notices)
	t.save(ctx)
	t.looked, t.listed = sick, time.Now()
	if err == nil {
		t.again, t.retry = listInterval, lookInterval
	} else {
		t.again, t.retry = t.retry, min(2*t.retry, listInterval)
	}
	return err
}

// tellAll tells what is due, namespace by namespace. If an Event cannot be written,
// as where a webhook of the namespace fails, the others of that namespace are left
// for the next time: each may take as long. Namespaces that failed the last time
// come last, so that they keep no other waiting.
func (t *Teller) tellAll(ctx context.Context, notices []notice) error {
	slices.SortStableFunc(notices, func(a, b notice) int {
		return cmp.Compare(order(t.failing[a.pod.Namespace]), order(t.failing[b.pod.Namespace]))
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

// order puts what failed last.
func order(failing bool) int {
	if failing {
		return 1
	}
	return 0
}

// sameState reports whether the same is to be told of the device to the same. In
// what words it is wrong is not told again.
func sameState(a, b Device) bool {
	return a.Name == b.Name && a.Health.Key() == b.Health.Key() && a.Health.Since.Equal(&b.Health.Since) &&
		slices.Equal(a.Claims, b.Claims) && slices.Equal(a.Pods, b.Pods)
}

// forget forgets what pods that are no more were told. A device that a pod
// seems to lack for the moment is not forgotten.
func (t *Teller) forget(pods []Pod) {
	present := make(map[types.UID]bool, len(pods))
	for _, pod := range pods {
		present[pod.UID] = true
	}
	maps.DeleteFunc(t.told, func(k key, _ state) bool { return !present[k.pod] })
}

// tell tells a pod what is due.
func (t *Teller) tell(ctx context.Context, n *notice) error {
	if err := create(ctx, t.Client, n.event(t.Node, time.Now())); err != nil {
		return err
	}
	if n.device.Health.Usable() {
		delete(t.told, n.key())
	} else {
		t.told[n.key()] = n.state
	}
	return nil
}

// create writes an Event. One that is refused for good, as in a namespace that is
// being deleted, counts as written.
func create(ctx context.Context, client kubernetes.Interface, event *eventsv1.Event) error {
	ctx, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	_, err := client.EventsV1().Events(event.Namespace).Create(ctx, event, metav1.CreateOptions{})
	pod := event.Regarding
	switch {
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsNotFound(err):
		klog.FromContext(ctx).Error(err, "A pod cannot be told", "pod", klog.KRef(pod.Namespace, pod.Name), "reason", event.Reason, "note", event.Note)
	case err != nil && !apierrors.IsAlreadyExists(err):
		return fmt.Errorf("create Event for pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}

// entry is a line of what was told, as it is written down.
type entry struct {
	Pod       types.UID           `json:"pod"`
	Device    string              `json:"device"`
	Condition discovery.Condition `json:"condition"`
	Since     metav1.Time         `json:"since"`
}

// load reads what was told before. Where it cannot, some of it is told again.
func (t *Teller) load(ctx context.Context) {
	t.told, t.retry = make(map[key]state), lookInterval
	data, err := t.Files.Read(t.File)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var entries []entry
	if err == nil {
		err = json.Unmarshal(data, &entries)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "It is not known any more which Events pods got; they may get some again")
		return
	}
	t.saved = data
	for _, e := range entries {
		t.told[key{e.Pod, e.Device}] = state{e.Condition, e.Since.Unix()}
	}
}

// save writes down what was told, if that is not written yet.
func (t *Teller) save(ctx context.Context) {
	entries := make([]entry, 0, len(t.told))
	for k, s := range t.told {
		entries = append(entries, entry{k.pod, k.device, s.condition, metav1.Unix(s.since, 0)})
	}
	slices.SortFunc(entries, func(a, b entry) int {
		return cmp.Or(strings.Compare(string(a.Pod), string(b.Pod)), strings.Compare(a.Device, b.Device))
	})
	data, err := json.Marshal(entries)
	if err != nil || bytes.Equal(data, t.saved) {
		return
	}
	if _, err := t.Files.Write(t.File, data, 0o600); err != nil {
		klog.FromContext(ctx).Error(err, "Writing down what pods were told of their devices")
		return
	}
	t.saved = data
}
