package podevents

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"chandler.dev/discovery"
)

func named(namespace, name string) types.NamespacedName {
	return types.NamespacedName{Namespace: namespace, Name: name}
}

func pod(name string, claims ...string) Pod {
	return Pod{NamespacedName: named("default", name), UID: types.UID("uid-" + name), Claims: claims}
}

// node is a node with pods, their devices, and a Notifier.
type node struct {
	t       *testing.T
	client  *fake.Clientset
	dir     string
	devices []Device
	pods    []Pod
	lists   int                   // number of requests for pods
	answer  atomic.Pointer[error] // the error of the API server, or nil
	teller  *Notifier
}

func newNode(t *testing.T) *node {
	n := &node{t: t, client: fake.NewClientset(), dir: t.TempDir()}
	n.client.PrependReactor("create", "events", func(clienttesting.Action) (bool, runtime.Object, error) { return n.down() != nil, nil, n.down() })
	n.devices = []Device{
		{Name: "claimed", Model: "MI300X", Claims: []types.NamespacedName{named("default", "c")}},
		{Name: "classic", Pods: []types.NamespacedName{named("default", "old")}},
	}
	n.pods = []Pod{pod("one", "c"), pod("old"), pod("two", "b", "c"), pod("none", "b"), {NamespacedName: named("other", "one"), UID: "uid-x", Claims: []string{"c"}}}
	n.restart()
	return n
}

// restart replaces the Notifier by a new one with the same file.
func (n *node) restart() {
	n.teller = &Notifier{
		Client: n.client, Node: "worker-1", File: filepath.Join(n.dir, "events.json"),
		Pods: func(context.Context) ([]Pod, error) {
			n.lists++
			if errors.Is(n.down(), errDown) {
				return nil, errDown
			}
			return slices.Clone(n.pods), nil
		},
	}
	n.teller.load(n.t.Context())
}

var errDown = errors.New("connection refused")

// fails makes the API server respond with an error.
func (n *node) fails(err error) { n.answer.Store(&err) }

func (n *node) down() error {
	if err := n.answer.Load(); err != nil {
		return *err
	}
	return nil
}

// wants checks the devices, and expects exactly these Events in the form "pod reason".
func (n *node) wants(want ...string) {
	n.t.Helper()
	err := n.teller.sendDue(n.t.Context(), n.devices)
	if (err != nil) != (n.down() != nil && !apierrors.IsForbidden(n.down())) {
		n.t.Errorf("look: %v", err)
	}
	var got []string
	for _, e := range n.events() {
		got = append(got, e.Regarding.Name+" "+e.Reason)
	}
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		n.t.Error(diff)
	}
	n.client.ClearActions()
}

// events returns the Events created since the last call of wants.
func (n *node) events() (told []*eventsv1.Event) {
	for _, action := range n.client.Actions() {
		if create, ok := action.(clienttesting.CreateAction); ok && n.down() == nil {
			told = append(told, create.GetObject().(*eventsv1.Event))
		}
	}
	return told
}

// is sets the health of a device.
func (n *node) is(device string, health discovery.Health) {
	i := slices.IndexFunc(n.devices, func(d Device) bool { return d.Name == device })
	n.devices[i].Health = health
}

var (
	began   = metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	sick    = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionDriverUnbound, Reason: "no driver is bound to it", Since: began, Effect: resourceapi.DeviceTaintEffectNoSchedule}
	unread  = discovery.Health{Status: discovery.Unknown, Reason: "EIO", Since: began, Effect: resourceapi.DeviceTaintEffectNoSchedule}
	told    = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionLinkDegraded, Reason: "slow", Since: began, Effect: resourceapi.DeviceTaintEffectNone}
	gone    = discovery.GoneHealth(resourceapi.DeviceTaintEffectNoSchedule)
	healthy = discovery.Health{Status: discovery.Healthy, Since: began}
)

// again returns the same health with a later start.
func again(h discovery.Health, after time.Duration) discovery.Health {
	h.Since = metav1.NewTime(h.Since.Add(after))
	return h
}

func TestTell(t *testing.T) {
	tests := map[string]func(n *node){
		"all is well": func(n *node) {
			n.wants()
			if n.lists > 0 {
				n.t.Error("asks for pods though there is nothing to tell")
			}
		},
		"by a claim that pods share, and recovered": func(n *node) {
			n.is("claimed", sick)
			n.wants("one DeviceUnhealthy", "two DeviceUnhealthy")
			n.wants()
			n.is("claimed", healthy)
			n.wants("one DeviceRecovered", "two DeviceRecovered")
			n.wants()
		},
		"by the device-plugin API": func(n *node) {
			n.is("classic", unread)
			n.wants("old DeviceUnknown")
			n.is("classic", healthy)
			n.wants("old DeviceRecovered")
		},
		"the reason has other words": func(n *node) {
			n.is("classic", sick)
			n.wants("old DeviceUnhealthy")
			other := sick
			other.Reason = "still none"
			n.is("classic", other)
			n.wants()
			if n.lists != 1 {
				n.t.Errorf("asked for pods %d times, want once", n.lists)
			}
		},
		"by claims of which one has what was replaced": func(n *node) {
			n.devices[0].Health = gone
			since := Device{Name: "claimed", Health: healthy, Claims: []types.NamespacedName{named("default", "b")}}
			n.devices = slices.Insert(n.devices, 1, since)
			n.wants("one DeviceGone", "two DeviceGone")
			n.devices[1].Health = sick
			n.wants("none DeviceUnhealthy")
			n.is("claimed", healthy)
			n.devices[1].Health = healthy
			n.wants("none DeviceRecovered", "one DeviceRecovered", "two DeviceRecovered")
		},
		"another state": func(n *node) {
			n.is("classic", sick)
			n.wants("old DeviceUnhealthy")
			n.is("classic", again(unread, time.Minute))
			n.wants("old DeviceUnknown")
			n.is("classic", again(sick, 2*time.Minute))
			n.wants("old DeviceUnhealthy")
		},
		"an informative taint keeps no pod away": func(n *node) {
			n.is("classic", told)
			n.wants()
			n.is("classic", again(sick, time.Minute))
			n.wants("old DeviceUnhealthy")
			n.is("classic", again(told, 2*time.Minute))
			n.wants("old DeviceRecovered")
		},
		"a restart repeats nothing": func(n *node) {
			n.is("claimed", sick)
			n.is("classic", gone)
			n.wants("old DeviceGone", "one DeviceUnhealthy", "two DeviceUnhealthy")
			n.restart()
			n.wants()
			n.restart()
			n.is("claimed", again(healthy, time.Minute))
			n.wants("one DeviceRecovered", "two DeviceRecovered")
			n.restart()
			n.is("classic", healthy)
			n.wants("old DeviceRecovered")
			n.restart()
			n.wants()
		},
		"gone twice": func(n *node) {
			n.is("classic", gone)
			n.wants("old DeviceGone")
			n.is("classic", healthy)
			n.wants("old DeviceRecovered")
			time.Sleep(time.Second)
			n.is("classic", gone)
			n.wants("old DeviceGone")
			time.Sleep(time.Second)
			n.restart()
			n.wants()
		},
		"the same sickness twice, with a restart between": func(n *node) {
			n.is("classic", sick)
			n.wants("old DeviceUnhealthy")
			n.restart()
			n.is("classic", again(sick, time.Minute))
			n.wants("old DeviceUnhealthy")
		},
		"a pod of the same name": func(n *node) {
			n.is("classic", sick)
			n.wants("old DeviceUnhealthy")
			n.pods[1].UID = "uid-new"
			n.wants()
			time.Sleep(listInterval)
			n.wants("old DeviceUnhealthy")
		},
		"another pod gets what is sick": func(n *node) {
			n.is("classic", sick)
			n.wants("old DeviceUnhealthy")
			n.devices[1].Pods = append(n.devices[1].Pods, named("default", "none"))
			n.wants("none DeviceUnhealthy")
		},
		"a pod ends": func(n *node) {
			n.is("classic", sick)
			n.wants("old DeviceUnhealthy")
			n.pods = slices.Delete(n.pods, 1, 2)
			n.devices = n.devices[:1]
			n.wants()
			if len(n.teller.sent) > 0 {
				n.t.Errorf("remembered: %v", n.teller.sent)
			}
		},
		"who has it is not known for a while": func(n *node) {
			n.is("classic", sick)
			n.wants("old DeviceUnhealthy")
			all := n.devices
			n.devices = all[:1]
			n.wants()
			n.devices = all
			n.wants()
		},
		"the API server is down": func(n *node) {
			n.fails(errDown)
			n.is("claimed", sick)
			n.is("classic", sick)
			n.wants()
			n.is("classic", healthy)
			n.wants()
			n.fails(nil)
			time.Sleep(2 * lookInterval)
			n.wants("one DeviceUnhealthy", "two DeviceUnhealthy")
			n.fails(errDown)
			n.is("claimed", again(healthy, time.Minute))
			n.wants()
			n.restart()
			n.fails(nil)
			n.wants("one DeviceRecovered", "two DeviceRecovered")
		},
		"the API server is down for an hour": func(n *node) {
			n.fails(errDown)
			n.is("classic", sick)
			for range time.Hour / lookInterval {
				_ = n.teller.sendDue(n.t.Context(), n.devices)
				time.Sleep(lookInterval)
			}
			if n.lists < 12 || n.lists > 20 {
				n.t.Errorf("pods were requested %d times in an hour", n.lists)
			}
			n.fails(nil)
			time.Sleep(listInterval)
			n.wants("old DeviceUnhealthy")
		},
		"the API server takes no Events for now": func(n *node) {
			n.fails(apierrors.NewTooManyRequestsError("later"))
			n.is("classic", sick)
			n.wants()
			n.fails(nil)
			time.Sleep(lookInterval)
			n.wants("old DeviceUnhealthy")
		},
		"the namespace is being deleted": func(n *node) {
			n.fails(apierrors.NewForbidden(schema.GroupResource{Resource: "events"}, "e", errors.New("it is being terminated")))
			n.is("classic", sick)
			n.wants()
			n.fails(nil)
			n.wants()
		},
		"the file is lost, and the Event is there": func(n *node) {
			n.is("classic", sick)
			n.wants("old DeviceUnhealthy")
			if err := os.Remove(n.teller.File); err != nil {
				n.t.Error(err)
			}
			n.restart()
			n.fails(apierrors.NewAlreadyExists(schema.GroupResource{Resource: "events"}, "e"))
			if err := n.teller.sendDue(n.t.Context(), n.devices); err != nil {
				n.t.Error(err)
			}
		},
		"the file is damaged": func(n *node) {
			if err := os.WriteFile(n.teller.File, []byte(`[{"pod":`), 0o600); err != nil {
				n.t.Error(err)
			}
			n.restart()
			n.is("classic", sick)
			n.wants("old DeviceUnhealthy")
			n.restart()
			n.wants()
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test(newNode(t)) })
		})
	}
}

func TestEvent(t *testing.T) {
	n := newNode(t)
	n.is("claimed", sick)
	if err := n.teller.sendDue(t.Context(), n.devices); err != nil {
		t.Fatal(err)
	}
	e := n.events()[0]
	got := fmt.Sprintf("%s %s %s %s %s|%s|%s", e.Namespace, e.Regarding.UID, e.Regarding.Kind, e.Type, e.ReportingController, e.ReportingInstance, e.Note)
	if want := "default uid-one Pod Warning chandler.dev|worker-1|Device claimed (MI300X) is unhealthy (driver-unbound): no driver is bound to it"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	swapped := gone
	swapped.Reason = "device d was swapped"
	notes := map[string]discovery.Health{
		"Device d is gone: device d was swapped":          swapped,
		"Device d cannot be read: EIO":                    unread,
		"Device d is gone":                                gone,
		"Device d can be used again":                      healthy,
		"Device d can be used again; link-degraded: slow": told,
		"Device d is unhealthy (unhealthy): unhealthy":    {Status: discovery.Unhealthy},
	}
	for want, health := range notes {
		one := notice{pod: &n.pods[0], device: &Device{Name: "d", Health: health}}
		if _, got := one.eventText(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// The API server accepts the Event for any names and reasons from families, the kernel or
// users.
func FuzzEvent(f *testing.F) {
	f.Add("pod", "worker", "reason", "device")
	f.Add(strings.Repeat("a.", 126)+"a", strings.Repeat("n", 253), strings.Repeat("ü", 900), "\xff")
	f.Fuzz(func(t *testing.T, name, node, reason, model string) {
		if len(validation.IsDNS1123Subdomain(name)) > 0 || len(validation.IsDNS1123Subdomain(node)) > 0 {
			t.Skip()
		}
		of := pod(name)
		health := sick
		health.Reason = reason
		n := notice{pod: &of, device: &Device{Name: "d", Model: model, Health: health}}
		e := n.newEvent(node, began.Time)
		if messages := validation.IsDNS1123Subdomain(e.Name); len(messages) > 0 {
			t.Errorf("name %q: %v", e.Name, messages)
		}
		if len(e.Note) > maxNote || len(e.ReportingInstance) > maxInstance || e.ReportingInstance == "" || !strings.HasPrefix(e.Note, "Device d") {
			t.Errorf("%+v", e)
		}
	})
}

// Any file is either read or ignored, and the records read are written back unchanged.
func FuzzLoad(f *testing.F) {
	f.Add([]byte(`[{"pod":"u","device":"d","condition":"gone","since":"2026-01-02T03:04:05Z"}]`))
	f.Add([]byte(`[{"pod":"u","device":"d"},{"pod":"u","device":"d","since":null}]`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, data []byte) {
		file := filepath.Join(t.TempDir(), "events.json")
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
		first, second := Notifier{File: file}, Notifier{File: file}
		first.load(t.Context())
		first.saveSent(t.Context())
		second.load(t.Context())
		if diff := cmp.Diff(first.sent, second.sent, cmp.AllowUnexported(key{}, state{})); diff != "" {
			t.Error(diff)
		}
	})
}

// A namespace that rejects Events, for example because its webhook fails or hangs, does not
// delay the Events of other namespaces. It is retried at increasing intervals.
func TestOneNamespaceFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		broken := true
		tries := 0
		n.client.PrependReactor("create", "events", func(action clienttesting.Action) (bool, runtime.Object, error) {
			if action.GetNamespace() != "broken" || !broken {
				return false, nil, nil
			}
			tries++
			time.Sleep(createTimeout)
			return true, nil, apierrors.NewInternalError(errors.New("failed calling webhook"))
		})
		n.devices = []Device{{Name: "shared", Health: sick}}
		n.pods = nil
		for _, namespace := range []string{"broken", "works"} {
			for _, name := range []string{"a", "b"} {
				p := Pod{NamespacedName: named(namespace, name), UID: types.UID(namespace + name)}
				n.pods = append(n.pods, p)
				n.devices[0].Pods = append(n.devices[0].Pods, p.NamespacedName)
			}
		}
		told := func() (all []string) {
			for _, e := range n.events() {
				if e.Namespace == "works" || !broken {
					all = append(all, e.Namespace+" "+e.Regarding.Name)
				}
			}
			n.client.ClearActions()
			return all
		}
		if err := n.teller.sendDue(t.Context(), n.devices); err == nil {
			t.Error("no error for the namespace that fails")
		}
		if diff := cmp.Diff([]string{"works a", "works b"}, told()); diff != "" || tries != 1 {
			t.Errorf("%d tries in the namespace that fails, want 1; in the other:\n%s", tries, diff)
		}
		// A new notice for the other namespace does not wait for the failing namespace.
		n.is("shared", again(sick, time.Minute))
		began := time.Now()
		n.client.PrependReactor("create", "events", func(action clienttesting.Action) (bool, runtime.Object, error) {
			if action.GetNamespace() == "works" && time.Since(began) >= createTimeout {
				t.Error("the namespace that works waited for the other")
			}
			return false, nil, nil
		})
		n.teller.sendDue(t.Context(), n.devices)
		if diff := cmp.Diff([]string{"works a", "works b"}, told()); diff != "" {
			t.Error(diff)
		}
		tries, n.lists = 0, 0
		for range 30 {
			time.Sleep(lookInterval)
			n.teller.sendDue(t.Context(), n.devices)
		}
		if tries == 0 || tries > 5 || n.lists != tries {
			t.Errorf("%d tries in 5 minutes, and pods were asked for %d times", tries, n.lists)
		}
		n.client.ClearActions()
		broken = false
		time.Sleep(listInterval)
		n.teller.sendDue(t.Context(), n.devices)
		if diff := cmp.Diff([]string{"broken a", "broken b"}, told()); diff != "" {
			t.Error(diff)
		}
	})
}

// Run sends one notice soon after several changes, for the last state, and ends with its
// context.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		var known atomic.Bool
		var mu sync.Mutex
		n.teller.InUse = func() ([]Device, bool) {
			mu.Lock()
			defer mu.Unlock()
			return slices.Clone(n.devices), known.Load()
		}
		ctx, cancel := context.WithCancel(t.Context())
		changed, ended := make(chan struct{}, 1), make(chan struct{})
		n.is("classic", sick)
		go func() {
			defer close(ended)
			n.teller.Run(ctx, changed)
		}()
		synctest.Wait()
		if len(n.events()) > 0 {
			t.Error("tells before it is known who has what")
		}
		known.Store(true)
		time.Sleep(unknownInterval)
		synctest.Wait()
		if len(n.events()) != 1 {
			t.Errorf("%d Events, want 1", len(n.events()))
		}
		n.fails(errDown)
		n.client.ClearActions()
		n.is("classic", again(sick, time.Minute))
		changed <- struct{}{}
		time.Sleep(changePause)
		synctest.Wait()
		n.fails(nil)
		time.Sleep(lookInterval)
		synctest.Wait()
		if len(n.events()) != 1 {
			t.Errorf("%d Events once the API server answers, want 1", len(n.events()))
		}
		n.client.ClearActions()
		for _, condition := range []discovery.Condition{discovery.ConditionNodeMissing, discovery.ConditionDriverUnbound} {
			mu.Lock()
			n.is("classic", discovery.Health{Status: discovery.Unhealthy, Condition: condition, Since: metav1.Now()})
			mu.Unlock()
			changed <- struct{}{}
			time.Sleep(time.Second)
		}
		time.Sleep(lookInterval)
		synctest.Wait()
		if told := n.events(); len(told) != 1 || !strings.Contains(told[0].Note, string(discovery.ConditionDriverUnbound)) {
			t.Errorf("told of a state that went on to another: %v", told)
		}
		cancel()
		<-ended
	})
}
