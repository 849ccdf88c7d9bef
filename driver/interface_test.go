package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

// TestInterfaceThatIsRenamed prepares a network function whose interface was renamed after the
// scan, as udev does shortly after a hot-plug. No container may get the interface that has the old
// name now.
func TestInterfaceThatIsRenamed(t *testing.T) {
	const source = "sys/devices/pci0000:00/0000:00:02.0"
	link := func(name, below string) fstest.MapFS {
		return fstest.MapFS{"sys/class/net/" + name: &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("../../devices/" + below + "/net/" + name)}}
	}
	function := func(name string) rules.Offered {
		d := rules.Offered{Device: discovery.Device{Name: "a", Family: "nic", Source: source, Attributes: discovery.Attributes{}}}
		d.Attributes.SetString("ifName", name)
		return d
	}
	for name, test := range map[string]struct {
		files fstest.MapFS
		want  string // the container's interface
	}{
		"as it was":                  {link("eth0", "pci0000:00/0000:00:02.0"), "eth0"},
		"of what was made of it":     {link("eth0", "pci0000:00/0000:00:02.0/virtio3"), "eth0"},
		"in its directory":           {fstest.MapFS{source + "/net/eth0/type": &fstest.MapFile{}}, "eth0"},
		"another one's by now":       {link("eth0", "pci0000:00/0000:00:03.0"), "ens2"},
		"one's with a longer path":   {link("eth0", "pci0000:00/0000:00:02.01"), "ens2"},
		"a free name":                {link("ens9", "pci0000:00/0000:00:02.0"), "ens2"},
		"a file that is no such one": {fstest.MapFS{"sys/class/net/eth0": &fstest.MapFile{}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			maps.Copy(b.host, test.files)
			b.config.Granter = func(devices []discovery.Device, _ discovery.Grant) specs.ContainerEdits {
				return specs.ContainerEdits{NetDevices: []*specs.LinuxNetDevice{{HostInterfaceName: devices[0].Attributes.String("ifName"), Name: "net1"}}}
			}
			b.config.Rescan = func() {
				maps.Copy(b.host, link("ens2", "pci0000:00/0000:00:02.0"))
				b.offers(function("ens2"))
			}
			b.restart().offers(function("eth0"))
			c := claim("c", "a")
			if test.want == "" {
				mustRefuse(t, b, c, "sys/class/net/eth0")
				return
			}
			mustPrepare(t, b, c)
			got := b.specOf(c)["chandler.dev/claim=uid-c-0-a"].NetDevices
			if len(got) != 1 || got[0].HostInterfaceName != test.want {
				t.Errorf("the container gets %+v, want %s", got, test.want)
			}
			// The interface has left the host, and the claim still has it.
			for name := range b.host {
				delete(b.host, name)
			}
			mustPrepare(t, b, c)
		})
	}
}

// No slice is written because pods with network functions start and end, although each claim ends
// before the interface has returned to the host. The functions are devices of their own, or the API
// server keeps no counters. An interface that does not return, or returns with another name, leads to
// one write.
func TestInterfaceReturnsAfterClaim(t *testing.T) {
	const count = 4
	for name, test := range map[string]struct {
		common   string // name of the functions that are published as one
		counters bool
		returns  string // prefix of the names of the interfaces that return
		writes   int
	}{
		"to the host":                            {"functions", true, "eth", 0},
		"to the host, without counters":          {"functions", false, "eth", 0},
		"with other names":                       {"functions", true, "ens", count},
		"not, and all claims have ended at once": {"functions", true, "", 1},
		"not, and the device is published alone": {"", true, "", 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, helper := newBench(t), &pooltest.Helper{}
				if !test.counters {
					b.config.KubeClient = pooltest.ChangingServer(t, pooltest.WithoutCounters)
				}
				var interfaces [count]string
				offer := func(i int, name string) {
					interfaces[i] = name
					var devices []rules.Offered
					for i, name := range interfaces {
						d := rules.Offered{Device: discovery.Device{Name: fmt.Sprint("vf-", i), Family: "nic", Interchangeable: test.common, Attributes: discovery.Attributes{}}}
						d.Attributes.SetString("kind", "nic")
						d.Attributes.SetString("driver", "iavf")
						d.Attributes.SetInt("vfIndex", int64(i))
						d.Attributes.SetString("ifName", name)
						devices = append(devices, d)
					}
					b.Publish(&rules.Snapshot{Devices: devices, Attributes: []resourceapi.QualifiedName{"vfIndex"}}, nil)
					synctest.Wait()
				}
				for i := range interfaces {
					interfaces[i] = fmt.Sprint("eth", i)
				}
				stop := b.run(helper)
				offer(0, "eth0")
				pooltest.ExpectPublished(t, helper, "vf-0 vf-1 vf-2 vf-3")
				claims := make([]*resourceapi.ResourceClaim, count)
				for i := range claims {
					claims[i] = fromOtherPool(claim(fmt.Sprint("c", i), fmt.Sprint("vf-", i)))
					mustPrepare(t, b, claims[i])
					offer(i, "")
				}
				for _, c := range claims {
					mustUnprepare(t, b, c)
					synctest.Wait()
				}
				for i := range interfaces {
					if test.returns != "" {
						offer(i, fmt.Sprint(test.returns, i))
					}
				}
				time.Sleep(2 * interfaceReturn)
				if got := helper.PublishedSketches(); len(got) != test.writes {
					t.Errorf("%d writes, want %d", len(got), test.writes)
				}
				if err := stop(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// Only claims that ended a short time ago are in memory, although the names of devices differ.
func TestClaimEndsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h claimHandler
		for i := range 100 {
			h.noteEnd(&allocation.Claim{Results: []allocation.Result{{Source: fmt.Sprint("part-", i)}}})
			time.Sleep(interfaceReturn / 2)
		}
		kept := 0
		for range h.claimEnds.Range {
			kept++
		}
		if kept != 2 {
			t.Errorf("%d ends are in memory, want 2", kept)
		}
	})
}

// A claim that moves an interface by its name waits for the interface if the pod of the previous claim
// has just ended.
func TestPrepareWaitsForInterface(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.config.AcceptParameters = func(devices []discovery.Device, _ discovery.Parameters) error {
			if devices[0].Attributes.String("ifName") == "" {
				return errors.New("no interface")
			}
			return nil
		}
		offer := func(name string) {
			d := rules.Offered{Device: discovery.Device{Name: "a", Family: "nic", Attributes: discovery.Attributes{}}}
			d.Attributes.SetString("kind", "nic")
			d.Attributes.SetString("ifName", name)
			b.offers(d)
		}
		b.restart()
		offer("eth0")
		mustPrepare(t, b, claim("before", "a"))
		offer("")
		mustUnprepare(t, b, claim("before", "a"))
		time.AfterFunc(5*time.Second, func() { offer("eth0") })
		mustPrepare(t, b, claim("after", "a"))
		mustUnprepare(t, b, claim("after", "a"))

		offer("")
		time.Sleep(2 * interfaceReturn)
		began := time.Now()
		mustRefuse(t, b, claim("late", "a"), "no interface")
		if waited := time.Since(began); waited > 0 {
			t.Errorf("a claim waited %v for an interface that does not return", waited)
		}
	})
}
