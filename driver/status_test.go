package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/claimstatus"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

// statusBench is a running driver that writes the status of claims.
type statusBench struct {
	*bench
	client *fake.Clientset
}

// statusTest runs a test in a synctest bubble with a running driver.
func statusTest(t *testing.T, claims []*resourceapi.ResourceClaim, test func(t *testing.T, b *statusBench)) {
	synctest.Test(t, func(t *testing.T) {
		var objects []runtime.Object
		for _, c := range claims {
			objects = append(objects, c)
		}
		b := &statusBench{newBench(t), fake.NewClientset(objects...)}
		b.config.StatusClient = b.client
		b.has("enp1s0v0")
		b.config.Granter = func(given []discovery.Device, grant discovery.Grant) (edits specs.ContainerEdits) {
			if grant.Request == "net" {
				edits.NetDevices = []*specs.LinuxNetDevice{{HostInterfaceName: "enp1s0v0", Name: "net1"}}
			}
			return edits
		}
		stop := b.run(&pooltest.Helper{})
		defer func() {
			if err := stop(); err != nil {
				t.Errorf("Run: %v", err)
			}
		}()
		test(t, b)
	})
}

// said returns the device statuses of a claim, one line for each device.
func (b *statusBench) said(name string) (lines []string) {
	b.t.Helper()
	synctest.Wait()
	c, err := b.client.ResourceV1().ResourceClaims("default").Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, device := range c.Status.Devices {
		line := device.Driver + " " + device.Pool + " " + device.Device + " " + ptr.Deref(device.ShareID, "-")
		for _, condition := range device.Conditions {
			line += fmt.Sprintf(" %s=%s(%s %s)", condition.Type, condition.Status, condition.Reason, condition.Message)
		}
		if device.NetworkData != nil {
			line += " " + device.NetworkData.InterfaceName
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return lines
}

func (b *statusBench) expectSaid(name string, want ...string) {
	b.t.Helper()
	if diff := cmp.Diff(want, b.said(name)); diff != "" {
		b.t.Errorf("status of %s (-want +got):\n%s", name, diff)
	}
}

// verbs returns the verbs of the calls for claims since the last call of verbs.
func (b *statusBench) verbs() (verbs []string) {
	synctest.Wait()
	for _, action := range b.client.Actions() {
		if action.GetResource().Resource == "resourceclaims" {
			verbs = append(verbs, action.GetVerb())
		}
	}
	b.client.ClearActions()
	return verbs
}

// conditionsOf returns the conditions that a writer adds to the status of a prepared claim.
func conditionsOf(b *bench, c *resourceapi.ResourceClaim) (conditions []metav1.Condition) {
	b.t.Helper()
	client := fake.NewClientset(c).ResourceV1()
	record, _ := b.ledger.Claim(c.UID)
	claimstatus.NewWriter(client).WriteStatuses(context.Background(), []*allocation.Claim{record}, b.healthIn(b.view.Load()))
	written, err := client.ResourceClaims(c.Namespace).Get(context.Background(), c.Name, metav1.GetOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, device := range written.Status.Devices {
		conditions = append(conditions, device.Conditions...)
	}
	return conditions
}

// The status of a claim follows its devices. Entries of other drivers remain.
func TestStatus(t *testing.T) {
	share := types.UID("11111111-2222-3333-4444-555555555555")
	c := claim("c", "a", "vf", "kvm", "x")
	results := c.Status.Allocation.Devices.Results
	results[1].Request, results[2].ShareID, results[3].Driver = "net", &share, "other.example.com"
	c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: "other.example.com", Pool: "node", Device: "x",
		Conditions: []metav1.Condition{{Type: "Ready", Status: "True", Reason: "Theirs", LastTransitionTime: metav1.Now()}}}}
	const (
		function = "chandler.dev node vf - Ready=True(Prepared ) net1"
		shared   = "chandler.dev node kvm 11111111-2222-3333-4444-555555555555 Ready=True(Prepared )"
		theirs   = "other.example.com node x - Ready=True(Theirs )"
	)
	statusTest(t, []*resourceapi.ResourceClaim{c}, func(t *testing.T, b *statusBench) {
		a, vf, kvm := gpu("a", 1), gpu("vf", 2), rules.Offered{Device: discovery.Device{Name: "kvm", Shareable: true}}
		b.offers(a, kvm, vf)
		b.expectSaid("c", theirs)
		mustPrepare(t, b.bench, c)
		time.Sleep(statusQuiet)
		b.expectSaid("c", "chandler.dev node a - Ready=True(Prepared )", shared, function, theirs)

		b.client.ClearActions()
		b.offers(a, kvm, vf)
		if got := b.verbs(); got != nil {
			t.Errorf("with nothing new the API server is asked to %q", got)
		}
		time.Sleep(time.Hour)
		a.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "too hot"}
		b.offers(a, kvm, vf)
		b.expectSaid("c", "chandler.dev node a - Ready=False(Unhealthy too hot)", shared, function, theirs)
		a.Health = discovery.Health{Status: discovery.Unknown, Reason: "cannot be read"}
		b.offers(a, kvm, vf)
		b.expectSaid("c", "chandler.dev node a - Ready=Unknown(Unknown cannot be read)", shared, function, theirs)
		a.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "slow", Effect: resourceapi.DeviceTaintEffectNone}
		b.offers(a, kvm, vf)
		b.expectSaid("c", "chandler.dev node a - Ready=True(Prepared )", shared, function, theirs)
		b.offers(kvm, vf)
		b.expectSaid("c", "chandler.dev node a - Ready=False(Gone the device is gone)", shared, function, theirs)
	})
}

// A device that was replaced, or has another driver, is gone for its claim. A device that cannot be
// read or has no driver is not.
func TestStatusOfAReplacedDevice(t *testing.T) {
	c := claim("c", "a")
	statusTest(t, []*resourceapi.ResourceClaim{c}, func(t *testing.T, b *statusBench) {
		b.offers(gpu("a", 1))
		mustPrepare(t, b.bench, c)
		time.Sleep(statusQuiet)
		for _, test := range replacements {
			device := gpu("a", 1)
			test.change(&device)
			b.offers(device)
			b.expectSaid("c", "chandler.dev node a - Ready="+test.status)
			report := b.healthReport(b.view.Load(), time.Now())
			if len(report.Devices) != 1 || report.Devices[0].Health != test.reported {
				t.Errorf("%s: reported %v, want %v", test.name, report.Devices, test.reported)
			}
			if health := b.healthFor(c); health.Key() != test.condition {
				t.Errorf("%s: %v, want condition %q", test.name, health, test.condition)
			}
		}
	})
}

var replacements = []struct {
	name, status string
	change       func(*rules.Offered)
	reported     kubeletplugin.HealthStatus
	condition    discovery.Condition
}{
	{"swapped", "False(Gone device a was swapped: it is other now and was uuid-of-a when the claim was prepared)",
		func(d *rules.Offered) { d.Identity = "other" }, kubeletplugin.HealthStatusUnhealthy, discovery.ConditionGone},
	{"put back", "True(Prepared )",
		func(*rules.Offered) {}, kubeletplugin.HealthStatusHealthy, ""},
	{"another driver", `False(Gone device a has changed drivers: "vfio-pci" is bound to it now and "amdgpu" was when the claim was prepared)`,
		func(d *rules.Offered) { d.Attributes.SetString("driver", "vfio-pci") }, kubeletplugin.HealthStatusUnhealthy, discovery.ConditionGone},
	{"other numbers", "False(Gone device a has other nodes: it was given as /dev/a (226:1) and is /dev/a (226:7) now)",
		func(d *rules.Offered) { d.Edits.DeviceNodes[0].Minor = 7 }, kubeletplugin.HealthStatusUnhealthy, discovery.ConditionGone},
	{"another node", "False(Gone device a has other nodes: it was given as /dev/a (226:1) and is /dev/z (226:1) now)",
		func(d *rules.Offered) { d.Edits.DeviceNodes[0].HostPath = "/dev/z" }, kubeletplugin.HealthStatusUnhealthy, discovery.ConditionGone},
	{"one node more", "True(Prepared )", func(d *rules.Offered) {
		d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, &specs.DeviceNode{Path: "/dev/more", HostPath: "/dev/more"})
	}, kubeletplugin.HealthStatusHealthy, ""},
	{"neither is known", "True(Prepared )",
		func(d *rules.Offered) { d.Identity, d.Attributes = "", nil }, kubeletplugin.HealthStatusHealthy, ""},
	{"cannot be read", "Unknown(Unknown EIO)",
		func(d *rules.Offered) {
			d.Identity, d.Health = "other", discovery.Health{Status: discovery.Unknown, Reason: "EIO"}
		}, kubeletplugin.HealthStatusUnknown, discovery.ConditionUnknown},
	{"without a driver", "False(Unhealthy no driver)",
		func(d *rules.Offered) {
			d.Attributes, d.Health = nil, discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionDriverUnbound, Reason: "no driver"}
		}, kubeletplugin.HealthStatusUnhealthy, discovery.ConditionDriverUnbound},
}

// Two cards that were removed and found again with each other's device nodes are gone for their
// claims. The status of both claims shows this, and it is logged, until the nodes are as before.
func TestStatusOfRenumberedDevices(t *testing.T) {
	one, two := claim("one", "a"), claim("two", "b")
	statusTest(t, []*resourceapi.ResourceClaim{one, two}, func(t *testing.T, b *statusBench) {
		a, other := gpu("a", 1), gpu("b", 2)
		b.offers(a, other)
		mustPrepare(t, b.bench, one)
		mustPrepare(t, b.bench, two)
		a.Edits, other.Edits = other.Edits, a.Edits
		b.offers(a, other)
		time.Sleep(statusQuiet)
		b.expectSaid("one", "chandler.dev node a - Ready=False(Gone device a has other nodes: it was given as /dev/a (226:1) and is /dev/b (226:2) now; /dev/a is device b now)")
		b.expectSaid("two", "chandler.dev node b - Ready=False(Gone device b has other nodes: it was given as /dev/b (226:2) and is /dev/a (226:1) now; /dev/b is device a now)")
		a.Edits, other.Edits = other.Edits, a.Edits
		b.offers(a, other)
		b.expectSaid("one", "chandler.dev node a - Ready=True(Prepared )")
	})

	b := newBench(t).restart().offers(gpu("a", 1))
	mustPrepare(t, b, one)
	b.offers(gpu("a", 7))
	var log []string
	ctx := klog.NewContext(t.Context(), funcr.New(func(_, args string) { log = append(log, args) }, funcr.Options{}))
	w := claimstatus.NewWriter(fake.NewClientset(one).ResourceV1())
	for range 2 {
		w.WriteStatuses(ctx, b.ledger.Claims(), b.healthIn(b.view.Load()))
	}
	if len(log) != 1 || !strings.Contains(log[0], `"name"="one"`) || !strings.Contains(log[0], `"device"="a" "reason"="device a has other nodes: it was given as /dev/a (226:1) and is /dev/a (226:7) now"`) {
		t.Errorf("logged %q", log)
	}
}

// A device that changes during its configuration for a claim is not considered replaced.
func TestReplacedWhileConfiguring(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, f := newFPGAs(t)
		before := b.view.Load().snapshot
		f.hold = make(chan struct{})
		c := wanting("new", claim("c", "a"))
		replaced := func() bool {
			report := b.healthReport(b.view.Load(), time.Now())
			return report.Devices[0].Health != kubeletplugin.HealthStatusHealthy
		}
		if _, err := b.call(c); err == nil {
			t.Fatal("prepared")
		}
		other := gpu("a", 1)
		other.Identity = "other"
		b.offers(other)
		time.Sleep(time.Minute)
		if replaced() {
			t.Error("said while the claim is being prepared")
		}
		close(f.hold)
		b.Publish(before, nil)
		mustPrepare(t, b, c)
		b.offers(other)
		if replaced() || !b.healthFor(c).IsUsable() {
			t.Error("said before the next scan")
		}
		time.Sleep(readAgain)
		if !replaced() || b.healthFor(c).IsUsable() {
			t.Error("never said")
		}
	})
}

// If claims share a replaced device, claims that were prepared after the replacement have the new
// device. A claim with admin access does not make the device unhealthy for others.
func TestReplacedForSome(t *testing.T) {
	b := newBench(t)
	device := gpu("a", 1)
	device.Shareable = true
	b.restart().offers(device)
	admin := claim("admin", "a")
	admin.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	mustPrepare(t, b, admin)
	first := device
	device.Identity = "other"
	b.offers(device)
	if report := b.healthReport(b.view.Load(), time.Now()); report.Devices[0].Health != kubeletplugin.HealthStatusHealthy {
		t.Errorf("sick for a claim that is not there: %v", report.Devices)
	}
	b.offers(first)
	before, since := claim("before", "a"), claim("since", "a")
	mustPrepare(t, b, before)
	b.offers(device)
	mustPrepare(t, b, since)
	if b.healthFor(before).IsUsable() || !b.healthFor(since).IsUsable() {
		t.Error("it is not replaced for the claim before, or it is for the claim since")
	}
	for range 10 {
		if report := b.healthReport(b.view.Load(), time.Now()); report.Devices[0].Health != kubeletplugin.HealthStatusUnhealthy {
			t.Errorf("well for all claims: %v", report.Devices)
		}
	}
}

// The record of an agent that ended during the configuration of a device does not contain the
// device's new identity.
func TestReplacedBeforeACrash(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1))
	r := allocation.Claim{Results: []allocation.Result{{Device: "a", Source: "a", Identity: "other"}}}
	for _, configuring := range []bool{true, false} {
		r.Configuring = configuring
		if health := b.healthIn(b.view.Load())(&r, &r.Results[0]); health.IsUsable() != configuring {
			t.Errorf("configuring %t: %v", configuring, health)
		}
	}
}

// A new agent finds the status of its predecessor and writes nothing.
func TestStatusAfterARestart(t *testing.T) {
	c := claim("c", "a")
	statusTest(t, []*resourceapi.ResourceClaim{c}, func(t *testing.T, b *statusBench) {
		b.offers(gpu("a", 1))
		mustPrepare(t, b.bench, c)
		time.Sleep(statusQuiet)
		b.expectSaid("c", "chandler.dev node a - Ready=True(Prepared )")
		b.client.ClearActions()
		time.Sleep(time.Hour)
		w := claimstatus.NewWriter(b.client.ResourceV1())
		claims := b.ledger.Claims()
		claims[0].WithoutStatus = false // as in the record
		if again := w.WriteStatuses(t.Context(), claims, b.healthIn(b.view.Load())); !again.IsZero() || !slices.Equal(b.verbs(), []string{"get"}) {
			t.Error("it is written again")
		}
	})
}

// During a burst of prepared claims the API server is left to the starting pods, but only for a
// limited time.
func TestStatusWaitsForTheEndOfABurst(t *testing.T) {
	var claims []*resourceapi.ResourceClaim
	var devices []rules.Offered
	for i := range 25 {
		device := gpu(fmt.Sprintf("gpu-%02d", i), int64(i))
		devices, claims = append(devices, device), append(claims, claim(fmt.Sprint("c-", i), device.Name))
	}
	statusTest(t, claims, func(t *testing.T, b *statusBench) {
		b.offers(devices...)
		synctest.Wait() // for the status of no claims
		for _, c := range claims[:3] {
			mustPrepare(t, b.bench, c)
			time.Sleep(statusQuiet * 6 / 10)
			if got := b.verbs(); got != nil {
				t.Errorf("in a burst the API server is asked to %q", got)
			}
		}
		time.Sleep(statusQuiet)
		if got := b.verbs(); !slices.Equal(got, []string{"patch", "patch", "patch"}) {
			t.Errorf("after it the API server is asked to %q", got)
		}
		for _, c := range claims[3:] {
			mustPrepare(t, b.bench, c)
			time.Sleep(statusQuiet * 6 / 10)
		}
		if len(b.verbs()) == 0 {
			t.Error("nothing is written for as long as the burst lasts")
		}
	})
}

// A claim that was replaced or deleted gets no status.
func TestStatusOfReplacedClaims(t *testing.T) {
	c, other := claim("c", "a"), claim("c", "a")
	other.UID = "uid-of-another"
	statusTest(t, []*resourceapi.ResourceClaim{other}, func(t *testing.T, b *statusBench) {
		b.client.PrependReactor("patch", "resourceclaims", func(action clienttesting.Action) (bool, runtime.Object, error) {
			resource := schema.GroupResource{Resource: "resourceclaims"}
			if action.(clienttesting.PatchAction).GetName() == "gone" {
				return true, nil, apierrors.NewNotFound(resource, "gone")
			}
			return true, nil, apierrors.NewConflict(resource, "c", errors.New("another UID"))
		})
		b.offers(gpu("a", 1), gpu("b", 2))
		mustPrepare(t, b.bench, c)
		mustPrepare(t, b.bench, claim("gone", "b"))
		b.expectSaid("c")
		time.Sleep(time.Hour)
		b.client.ClearActions()
		b.offers(gpu("a", 1), gpu("b", 2))
		if got := b.verbs(); got != nil {
			t.Errorf("the API server is still asked to %q", got)
		}
	})
}

// If the API server rejects a status, the driver gives up. If the server does not answer or is
// overloaded, the driver tries at longer and longer intervals. Prepare is not affected.
func TestStatusThatCannotBeWritten(t *testing.T) {
	c := claim("c", "a")
	refusal := apierrors.NewForbidden(schema.GroupResource{Resource: "resourceclaims"}, "c", errors.New("no role"))
	for name, test := range map[string]struct {
		err          error
		fewest, most int // tries in an hour
	}{
		"refused":    {refusal, claimstatus.MaxRejections, claimstatus.MaxRejections},
		"unanswered": {errors.New("connection refused"), 20, 45},
		"overloaded": {apierrors.NewTooManyRequests("later", 1), 20, 45},
		"faulty":     {apierrors.NewInternalError(errors.New("no webhook")), 20, 45},
	} {
		t.Run(name, func(t *testing.T) {
			statusTest(t, []*resourceapi.ResourceClaim{c}, func(t *testing.T, b *statusBench) {
				tries, failing := 0, true
				b.client.PrependReactor("patch", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
					tries++
					return failing, nil, test.err
				})
				b.offers(gpu("a", 1))
				mustPrepare(t, b.bench, c)
				time.Sleep(time.Hour)
				synctest.Wait()
				if tries < test.fewest || tries > test.most {
					t.Errorf("tried %d times, want %d to %d", tries, test.fewest, test.most)
				}
				failing = false
				a := gpu("a", 1)
				a.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "too hot"}
				b.offers(a)
				time.Sleep(3*time.Minute + time.Second) // the longest pause
				b.expectSaid("c", "chandler.dev node a - Ready=False(Unhealthy too hot)")
			})
		})
	}
}
