package amdgpu_test

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/amdgpu/parttest"
	"chandler.dev/discovery/scan"
)

const (
	couldBe = "cpx-0? cpx-1? cpx-2? cpx-3? cpx-4? cpx-5? cpx-6? cpx-7? dpx-0? dpx-1? qpx-0? qpx-1? qpx-2? qpx-3?"
	asCPX   = "? cpx-0 cpx-1 cpx-2 cpx-3 cpx-4 cpx-5 cpx-6 cpx-7 dpx-0? dpx-1? qpx-0? qpx-1? qpx-2? qpx-3?"
)

// device returns a device of the first GPU in its present state.
func (h *dividing) device(t *testing.T, suffix string) discovery.Device {
	t.Helper()
	h.seen = nil
	for _, d := range h.scan(t).Devices {
		if d.Name == parttest.Device+suffix {
			return d.Device
		}
	}
	t.Fatalf("no device %q", suffix)
	return discovery.Device{}
}

// divides creates a partition.
func (h *dividing) divides(t *testing.T, suffix string) error {
	t.Helper()
	d := h.device(t, suffix)
	if d.Creation == nil {
		t.Fatalf("%s is there already", d.Name)
	}
	return h.makes(t, *d.Creation)
}

// is checks the existing and possible devices.
func (h *dividing) is(t *testing.T, want string) {
	t.Helper()
	h.seen = nil
	if got := sketch(h.scan(t)); got != want {
		t.Errorf("there are %q, want %q", got, want)
	}
}

// One write partitions a whole GPU, and one write changes from any mode to any other. Each
// partition has the nodes that KFD lists, in any order.
func TestDivides(t *testing.T) {
	for name, backwards := range map[string]bool{"in order": false, "backwards": true} {
		t.Run(name, func(t *testing.T) {
			h := newDividing(1)
			h.Backwards = backwards
			h.is(t, " "+couldBe)
			if err := h.divides(t, "-cpx-3"); err != nil {
				t.Fatal(err)
			}
			h.is(t, asCPX)
			for i, suffix := range []string{"-cpx-0", "-cpx-1", "-cpx-2"} {
				d := h.device(t, suffix)
				cores := d.Capacity["cores"].Value
				if nodes := d.OwnNodes(); len(nodes) != 1 || nodes[0].Path != h.Node(i) || cores.Value() != 38 {
					t.Errorf("%s: %+v", suffix, d)
				}
			}
			if err := h.divides(t, "-dpx-1"); err != nil {
				t.Fatal(err)
			}
			h.is(t, "? cpx-0? cpx-1? cpx-2? cpx-3? cpx-4? cpx-5? cpx-6? cpx-7? dpx-0 dpx-1 qpx-0? qpx-1? qpx-2? qpx-3?")
			if err := h.divides(t, ""); err != nil {
				t.Fatal(err)
			}
			h.is(t, " "+couldBe)
			if err := h.divides(t, "-qpx-0"); err != nil {
				t.Fatal(err)
			}
			if err := h.unmakes(t, parttest.Device); err != nil {
				t.Fatal(err)
			}
			h.is(t, " "+couldBe)
			if got, want := strings.Join(h.ListWrites(), ", "), "pci-0000-05-00-0 CPX, pci-0000-05-00-0 DPX, pci-0000-05-00-0 SPX, pci-0000-05-00-0 QPX, pci-0000-05-00-0 SPX"; got != want {
				t.Errorf("written %q, want %q", got, want)
			}
		})
	}
}

// A partition has the same memory, identity and place before and after its creation.
func TestPartStaysItself(t *testing.T) {
	h := newDividing(1)
	before := h.device(t, "-cpx-3")
	if err := h.divides(t, "-cpx-3"); err != nil {
		t.Fatal(err)
	}
	after := h.device(t, "-cpx-3")
	if before.Identity != after.Identity || before.Identity == "" || !maps.Equal(before.Takes, after.Takes) {
		t.Errorf("%+v, and then %+v", before, after)
	}
	for name, value := range before.Attributes {
		if after.Attributes.String(name) != before.Attributes.String(name) {
			t.Errorf("%s: %+v, and then %+v", name, value, after.Attributes[name])
		}
	}
}

// An open node of the GPU or of a partition prevents a change of the mode.
func TestInUse(t *testing.T) {
	h := newDividing(2)
	h.OpenNode("47", h.Node(0))
	if err := h.divides(t, "-cpx-0"); err == nil || !strings.Contains(err.Error(), "process 47 (someone) has it open") {
		t.Errorf("divided: %v", err)
	}
	h.OpenNode("47", "")
	if err := h.divides(t, "-cpx-0"); err != nil {
		t.Fatal(err)
	}
	h.OpenNode("47", h.Node(5))
	if err := h.unmakes(t, parttest.Device); err == nil || !strings.Contains(err.Error(), "process 47 (someone) has it open") {
		t.Errorf("put together: %v", err)
	}
	if err := h.divides(t, "-dpx-0"); err == nil || !strings.Contains(err.Error(), "process 47") {
		t.Errorf("divided otherwise: %v", err)
	}
	h.OpenNode("47", "/dev/dri/renderD137") // a node of the other GPU
	if err := h.unmakes(t, parttest.Device); err != nil {
		t.Error(err)
	}
	if h.Mode(0) != "SPX" || len(h.ListWrites()) != 2 {
		t.Errorf("written %q", h.ListWrites())
	}
}

// The error contains the kernel's refusal and a remedy. A mode that remains after an error is
// switched back, whether the kernel partitioned the GPU or not.
func TestRefused(t *testing.T) {
	for err, want := range map[syscall.Errno]string{
		syscall.EBUSY: "/dev/kfd", syscall.EINVAL: "no such mode", syscall.EPERM: "being reset", syscall.EIO: "KFD did not start", syscall.ENOMEM: "cannot allocate",
	} {
		h := newDividing(1)
		h.Refuse = func(string, string) error { return err }
		if got := h.divides(t, "-cpx-0"); !errors.Is(got, err) || !strings.Contains(got.Error(), want) {
			t.Errorf("%v: %v, want %q", err, got, want)
		}
		h.Refuse = nil
		if err := h.unmakes(t, parttest.Device); err != nil {
			t.Error(err)
		}
		h.is(t, " "+couldBe)
	}
	h := newDividing(1)
	h.Strict = true
	h.OpenNode("47", "/dev/kfd")
	if err := h.divides(t, "-cpx-0"); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("divided while a process computes: %v", err)
	}
}

// The kernel may refuse the change from one mode to another. The GPU is switched back from the mode
// in which it remained.
func TestRefusedOnTheWay(t *testing.T) {
	h := newDividing(1)
	if err := h.divides(t, "-cpx-0"); err != nil {
		t.Fatal(err)
	}
	h.Refuse = func(string, string) error { return syscall.EBUSY }
	if err := h.divides(t, ""); err == nil {
		t.Error("put together")
	}
	h.Refuse = nil
	h.is(t, asCPX)
	if err := h.unmakes(t, parttest.Device); err != nil {
		t.Error(err)
	}
	h.is(t, " "+couldBe)
}

// Partitions that KFD lists late, or never, are possible but do not exist. They are not offered to
// other consumers.
func TestFewer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newDividing(1)
		h.Late = time.Second
		if err := h.divides(t, "-cpx-7"); err != nil {
			t.Fatal(err)
		}
		h.is(t, "? cpx-0 cpx-1?! cpx-2?! cpx-3?! cpx-4?! cpx-5?! cpx-6?! cpx-7?! dpx-0? dpx-1? qpx-0? qpx-1? qpx-2? qpx-3?")
		if err := h.divides(t, "-cpx-7"); err != nil || len(h.ListWrites()) != 1 {
			t.Errorf("a second time: %v, written %q", err, h.ListWrites())
		}
		time.Sleep(2 * time.Second)
		h.is(t, asCPX)
		if err := h.unmakes(t, parttest.Device); err != nil {
			t.Error(err)
		}
	})
	h := newDividing(1)
	h.Few = 6
	if err := h.divides(t, "-cpx-7"); err != nil {
		t.Fatal(err)
	}
	h.is(t, "? cpx-0 cpx-1 cpx-2 cpx-3 cpx-4 cpx-5 cpx-6?! cpx-7?! dpx-0? dpx-1? qpx-0? qpx-1? qpx-2? qpx-3?")
}

// A mode that an administrator sets remains, before and after the agent's own changes.
func TestSetByHand(t *testing.T) {
	h := newDividing(1)
	if err := h.Set(0, "DPX"); err != nil {
		t.Fatal(err)
	}
	h.is(t, "xcp-0 xcp-1")
	if err := h.Set(0, "SPX"); err != nil {
		t.Fatal(err)
	}
	stale := *h.device(t, "-qpx-0").Creation
	if err := h.divides(t, "-cpx-0"); err != nil {
		t.Fatal(err)
	}
	if err := h.Set(0, "DPX"); err != nil {
		t.Fatal(err)
	}
	h.is(t, "xcp-0 xcp-1")
	if err := h.makes(t, stale); err == nil || !strings.Contains(err.Error(), "DPX, which another program has set") {
		t.Errorf("divided otherwise: %v", err)
	}
	if err := h.unmakes(t, parttest.Device); err != nil || h.Mode(0) != "DPX" {
		t.Errorf("%s: %v", h.Mode(0), err)
	}
	h.is(t, "xcp-0 xcp-1")
}

// After the administrator forbids partitions, existing partitions keep their names, and no other
// partitions are offered.
func TestNoMore(t *testing.T) {
	h := newDividing(1)
	if err := h.divides(t, "-dpx-0"); err != nil {
		t.Fatal(err)
	}
	host := h.host()
	host.Partitionings = nil
	var names []string
	for _, d := range scan.ReadHost(host, []*discovery.Family{family}).Devices {
		names = append(names, d.Name)
	}
	if want := []string{parttest.Device + "-dpx-0", parttest.Device + "-dpx-1"}; !slices.Equal(names, want) {
		t.Errorf("there are %q, want %q", names, want)
	}
}

// While the mode is unreadable, the GPU has only a problem: a consumer may have a partition.
func TestModeUnknown(t *testing.T) {
	h := newDividing(1)
	if err := h.divides(t, "-dpx-0"); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"UNKNOWN\n", "", "TPX\n"} {
		host := h.host()
		host.FS = h.With("current_compute_partition", text)
		s := scan.ReadHost(host, []*discovery.Family{family})
		if len(s.Devices) != 0 || len(s.Problems) != 1 || s.Problems[0].Device != parttest.Device {
			t.Errorf("%q: devices %v, problems %v", text, s.Devices, s.Problems)
		}
	}
}

// A GPU that cannot be whole, or has no other mode, is described without partitions.
func TestNothingToPartition(t *testing.T) {
	for text, want := range map[string]string{
		"SPX, DPX, QPX, CPX\n": " " + couldBe,
		"SPX, TPX, CPX\n":      " cpx-0? cpx-1? cpx-2? cpx-3? cpx-4? cpx-5? tpx-0? tpx-1? tpx-2?",
		"QPX, CPX\n":           "",
		"SPX\n":                "",
		"Not supported\n":      "",
		"":                     "",
	} {
		h := newDividing(1)
		host := h.host()
		files := h.With("available_compute_partition", text)
		if strings.Contains(text, "TPX") {
			files = h.WithDies(files, 6)
		}
		host.FS = files
		if got := sketch(applied(host)); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
