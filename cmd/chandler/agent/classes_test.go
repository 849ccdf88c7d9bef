package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// class returns a DeviceClass for a driver's devices; age is in minutes.
func class(name, resource, driver string, age int) *resourceapi.DeviceClass {
	c := &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{
			Name:              name,
			CreationTimestamp: metav1.NewTime(time.Date(2026, 1, 1, 0, -age, 0, 0, time.UTC)),
		},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{
			{CEL: &resourceapi.CELDeviceSelector{Expression: fmt.Sprintf("device.driver == %q", driver)}},
		}},
	}
	if resource != "" {
		c.Spec.ExtendedResourceName = &resource
	}
	return c
}

// Classes with the same name are reported if at least one class is for this driver, in the order of
// the scheduler's preference.
func TestClashes(t *testing.T) {
	got := findClashes([]resourceapi.DeviceClass{
		*class("ours", "nvidia.com/gpu", "chandler.dev", 5),
		*class("old", "nvidia.com/gpu", "gpu.nvidia.com", 9),
		*class("new", "nvidia.com/gpu", "gpu.nvidia.com", 1),
		*class("b", "amd.com/gpu", "chandler.dev", 1),
		*class("a", "amd.com/gpu", "chandler.dev", 1),
		*class("alone", "intel.com/gpu", "chandler.dev", 1),
		*class("theirs-1", "example.com/gpu", "example.com", 1),
		*class("theirs-2", "example.com/gpu", "example.com", 2),
		*class("nameless-1", "", "chandler.dev", 1),
		*class("nameless-2", "", "chandler.dev", 2),
	})
	want := []clash{
		{"amd.com/gpu", []string{"a", "b"}},
		{"nvidia.com/gpu", []string{"new", "ours", "old"}},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(clash{})); diff != "" {
		t.Errorf("clashes (-want +got):\n%s", diff)
	}
}

// The agent logs each warning once, and again after the classes have changed.
func TestClassCheck(t *testing.T) {
	var log []string
	logger := funcr.New(func(_, args string) { log = append(log, args) }, funcr.Options{})
	ctx := klog.NewContext(t.Context(), logger)
	client := fake.NewClientset(
		class("ours", "nvidia.com/gpu", "chandler.dev", 5),
		class("theirs", "nvidia.com/gpu", "gpu.nvidia.com", 9),
	)
	check := classCheck{client: draclient.New(client)}
	offered := []rules.Offered{{Offers: []discovery.Offer{{Resource: "nvidia.com/gpu"}}}}
	said := func(want ...string) {
		t.Helper()
		log = nil
		check.warn(ctx, offered)
		if len(log) != len(want) {
			t.Fatalf("logged %q; want %q", log, want)
		}
		for i := range want {
			if !strings.Contains(log[i], `"extendedResourceName"="nvidia.com/gpu"`) || !strings.Contains(log[i], want[i]) {
				t.Errorf("logged %q; want %q", log[i], want[i])
			}
		}
	}
	said(`["ours" "theirs"]`)
	said()
	if _, err := client.ResourceV1().DeviceClasses().Create(ctx, class("third", "nvidia.com/gpu", "gpu.nvidia.com", 1), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	said(`["third" "ours" "theirs"]`)
	for _, name := range []string{"third", "theirs"} {
		if err := client.ResourceV1().DeviceClasses().Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	said()
	if _, err := client.ResourceV1().DeviceClasses().Create(ctx, class("theirs", "nvidia.com/gpu", "gpu.nvidia.com", 9), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	said(`["ours" "theirs"]`)
}

// A name that DRA offers and no class has is logged once, and again after a class with the name has
// come and gone.
func TestNamesWithoutClass(t *testing.T) {
	var log []string
	ctx := klog.NewContext(t.Context(), funcr.New(func(_, args string) { log = append(log, args) }, funcr.Options{}))
	named := func(name string) rules.Offered {
		return rules.Offered{Device: discovery.Device{Name: "d"}, Offers: []discovery.Offer{{Resource: name}}}
	}
	offered := []rules.Offered{named("nvidia.com/gpu"), named("amd.com/gpu"), named("nvidia.com/gpu")}
	client := fake.NewClientset(class("amd", "amd.com/gpu", "chandler.dev", 1), class("nameless", "", "chandler.dev", 1))
	check := classCheck{client: draclient.New(client)}
	for i, want := range []int{1, 0, 0, 1} {
		log = nil
		switch i {
		case 2:
			_, err := client.ResourceV1().DeviceClasses().Create(ctx, class("nvidia", "nvidia.com/gpu", "chandler.dev", 1), metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
		case 3:
			if err := client.ResourceV1().DeviceClasses().Delete(ctx, "nvidia", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		check.warn(ctx, offered)
		if len(log) != want || want > 0 && !strings.Contains(log[0], `"extendedResourceName"="nvidia.com/gpu"`) {
			t.Errorf("look %d: logged %q; want %d of nvidia.com/gpu", i, log, want)
		}
	}
}

// Families whose devices no class selects are logged once.
func TestDevicesWithoutClass(t *testing.T) {
	var log []string
	ctx := klog.NewContext(t.Context(), funcr.New(func(_, args string) { log = append(log, args) }, funcr.Options{}))
	client := fake.NewClientset(class("theirs", "", "example.com", 1))
	check := classCheck{client: draclient.New(client)}
	offered := []rules.Offered{{Device: discovery.Device{Name: "a", Family: "sgx"}}, {Device: discovery.Device{Name: "b", Family: "dlb"}}}
	for i, want := range []int{1, 0, 0} {
		log = nil
		if i == 2 {
			if _, err := client.ResourceV1().DeviceClasses().Create(ctx, class("ours", "", "chandler.dev", 1), metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		check.warn(ctx, offered)
		if len(log) != want || want > 0 && !strings.Contains(log[0], `"families"=["dlb" "sgx"]`) {
			t.Errorf("check %d: logged %q", i, log)
		}
	}
}

// The classes are listed some minutes after the start and about once an hour. A claim of an unknown
// class leads to a list at once, but to one in a minute at most. Failures make lists rarer.
func TestClassesAreListedRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(class("ours", "nvidia.com/gpu", "chandler.dev", 5))
		var lists atomic.Int64
		var fails atomic.Bool
		client.PrependReactor("list", "deviceclasses", func(clienttesting.Action) (bool, runtime.Object, error) {
			lists.Add(1)
			return fails.Load(), nil, errors.New("timeout")
		})
		unknown := make(chan struct{}, 1)
		check := classCheck{client: draclient.New(client), unknown: unknown, offered: func() ([]rules.Offered, bool) { return nil, true }}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); check.run(ctx) }()
		expect := func(after time.Duration, fewest, most int64) {
			t.Helper()
			time.Sleep(after)
			synctest.Wait()
			if n := lists.Swap(0); n < fewest || n > most {
				t.Errorf("%d lists, want %d to %d", n, fewest, most)
			}
		}
		expect(3*time.Minute, 0, 0)
		expect(5*time.Minute, 1, 1)
		expect(10*time.Hour, 8, 14)
		for range 10 * 60 {
			notify(unknown)
			time.Sleep(time.Second)
		}
		expect(0, 9, 11)
		fails.Store(true)
		expect(10*time.Hour, 150, 500)
		cancel()
		<-ended
	})
}
