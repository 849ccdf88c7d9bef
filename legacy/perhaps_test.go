package legacy

import (
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list/listtest"
)

// For the kubelet, an ID from another plugin is not one of Chandler's IDs. Until PodResources
// answers, the devices of such IDs in the checkpoint are not allocated. Chandler's own IDs stay
// healthy, since the kubelet knows their containers and restarts these only with healthy IDs.
func TestWrittenDownBeforeTheKubeletAnswers(t *testing.T) {
	for name, holding := range map[string]kubeletapi.Holding{
		"by another resource":      {Resource: "example.org/before", IDs: []string{"a"}},
		"by the number of a share": {Resource: listtest.Resource, IDs: []string{"a" + discovery.Dialects()[0].Infix + "0"}},
		"by its nodes":             {Resource: "example.org/before", IDs: []string{"SN17"}, Nodes: []string{"/dev/gpuctl", "/dev/a"}},
	} {
		t.Run(name, func(t *testing.T) {
			k := kubelettest.New(t)
			k.MuteListing(true)
			k.Start()
			config := configFor(k)
			config.Written = func() ([]kubeletapi.Holding, error) {
				return []kubeletapi.Holding{holding, {Resource: listtest.Resource, IDs: []string{"b"}}}, nil
			}
			config.Allocated = func() (map[string][]string, error) {
				ids := map[string][]string{listtest.Resource: {"b"}}
				ids[holding.Resource] = append(ids[holding.Resource], holding.IDs...)
				return ids, nil
			}
			p := New(config)
			publish(p, gpus("a", "b", "c"))
			run(t, p)
			registered := k.AwaitPlugin(listtest.Resource, 1)
			listed := "a! b c"
			if holding.Resource == listtest.Resource {
				listed = "a! " + holding.IDs[0] + "! b c"
			}
			registered.AwaitList(t, listed)
			if said := registered.SentLists(); len(said) != 1 {
				t.Errorf("a list with what containers have was sent: %q", said)
			}
			if _, err := registered.AllocateIDs("a"); err == nil || !strings.Contains(err.Error(), "may be in use by a container, according to the kubelet's checkpoint") {
				t.Errorf("allocate: %v", err)
			}
			if _, err := registered.AllocateIDs("c"); err != nil {
				t.Errorf("allocate: %v", err)
			}
			k.MuteListing(false) // the container has ended
			registered.AwaitList(t, "a b c")
		})
	}
}

// The kubelet may list allocations before the host was scanned, for example with a slow disk. The
// ledger then recognises the devices as soon as they are scanned, before a waiting claim can get
// them.
func TestKnownAfterTheKubeletHasSaid(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	k.HoldIDs("train", "example.org/before", "a")
	p := New(configFor(k))
	run(t, p)
	<-p.Ready()
	if p.config.Ledger.Grants.LastListing().IsZero() {
		t.Fatal("the kubelet has not said what containers have")
	}
	p.SetHostDevices(host(gpus("a", "b")))
	for device, by := range map[string]string{"gpu-a": "default/train main", "gpu-b": ""} {
		if who, _ := holder(p, device); who != by {
			t.Errorf("%s is kept from claims by %q; want %q", device, who, by)
		}
	}
}

// PodResources does not list init containers. While the grants cannot be read, the lists therefore
// contain the IDs in the kubelet's checkpoint.
func TestInitContainerWhileGrantsCannotBeRead(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	var broken atomic.Bool
	broken.Store(true)
	d := &disktest.Disk{BeforeRead: func(name string) error {
		if broken.Load() && filepath.Base(name) == "grants.json" {
			return syscall.EIO
		}
		return nil
	}}
	config := configFor(k)
	config.Ledger = ledger.New(ledger.Config{Dir: stateOf(k), Boot: "boot", Listings: true, Patience: grace, Disk: d})
	config.Allocated = func() (map[string][]string, error) { return map[string][]string{listtest.Resource: {"gone"}}, nil }
	p := New(config)
	publish(p, gpus("a"))
	if problems, err := p.config.Ledger.Open(t.Context()); err != nil || len(problems) != 1 {
		t.Fatal(err, problems)
	}
	runOnly(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a gone!")
	kubelettest.NeverTrue(t, 3*grace, func() bool { return len(registered.SentLists()) > 1 }, func() string { return "it leaves the list" })
	broken.Store(false)
	if err := p.config.Ledger.ReconcileFiles(t.Context()); err != nil {
		t.Fatal(err)
	}
	registered.AwaitList(t, "a") // since there is no such grant
}
