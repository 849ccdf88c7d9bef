package guest_test

import (
	"fmt"
	"path"
	"strings"
	"testing"

	"chandler.dev/e2e/guest"
)

// TestPassthrough binds functions of a real kernel to vfio and back to their own drivers, and creates
// virtual functions on demand.
func TestPassthrough(t *testing.T) {
	programs := withHostService(t, programs(t))
	programs["guestrebind"] = guest.Build(t, "chandler.dev/e2e/cmd/guestrebind")
	programs["guestmake"] = guest.Build(t, "chandler.dev/e2e/cmd/guestmake")
	programs["guesthandover"] = guest.Build(t, "chandler.dev/e2e/cmd/guesthandover")
	g := guest.Boot(t, guest.Config{
		IOMMU:    "intel",
		Modules:  []string{"nvme", "e1000e", "igb", "igbvf", "vfio-pci", "vfio_iommu_type1"},
		Tools:    []string{"ip", "runc"},
		Programs: programs,
		Args: []string{
			"-device", "pcie-root-port,id=rp0,chassis=1", "-device", "nvme,serial=A,bus=rp0",
			"-device", "pcie-root-port,id=rp1,chassis=2", "-device", "e1000e,bus=rp1",
			"-device", "pcie-root-port,id=rp2,chassis=3", "-device", "igb,bus=rp2",
		},
	})
	t.Logf("Linux %s in QEMU %s", g.Kernel, g.QEMU)
	for _, driver := range []string{"nvme", "e1000e", "igb"} {
		r := rebound{g, driver, strings.Fields(g.Sh(t, "cd /sys/bus/pci/drivers/"+driver+"; ls -d 0*"))[0]}
		t.Run(driver, func(t *testing.T) {
			if driver != "nvme" {
				r.up(t)
			}
			r.take(t)
			r.give(t)
			if driver == "nvme" || !testing.Short() {
				t.Run("killed", r.killed)
			}
		})
	}
	r := rebound{g, "nvme", strings.Fields(g.Sh(t, "cd /sys/bus/pci/drivers/nvme; ls -d 0*"))[0]}
	t.Run("virtual functions on request", func(t *testing.T) {
		m := madeOf(t, g)
		m.makes(t)
		m.killed(t)
		if !testing.Short() {
			m.refuses(t)
		}
	})
	t.Run("open", r.open)
	t.Run("handed over", r.handsOver)
	t.Run("refuses to come back", r.refuses)
	n := newNode(t, g, rebindConfig+onRequest)
	t.Run("by the agent", func(t *testing.T) { byTheAgent(t, n, r) })
	t.Run("virtual functions by the agent", func(t *testing.T) { madeOf(t, g).byTheAgent(t, n) })
	t.Run("handed over by the agent", func(t *testing.T) { r.reclaimed(t, n) })
	t.Run("reboot", r.reboot)
	t.Run("bound before", r.before)
}

// rebound is a function with its own driver.
type rebound struct {
	*guest.Guest
	own, address string
}

func (r rebound) driver(t *testing.T) string {
	t.Helper()
	return strings.TrimSpace(r.Sh(t, "cd /sys/bus/pci/devices/"+r.address+"; basename $(readlink driver || echo none); cat driver_override"))
}

// check reports a driver other than the expected one.
func (r rebound) check(t *testing.T, want string) {
	t.Helper()
	if got := strings.Join(strings.Fields(r.driver(t)), " "); got != want {
		t.Errorf("%s: driver and override %q, want %q", r.address, got, want)
	}
}

func (r rebound) take(t *testing.T) {
	t.Helper()
	out := r.Must(t, "guestrebind", "take", r.address)
	r.check(t, "vfio-pci vfio-pci")
	if !strings.Contains(out, "/dev/vfio/") {
		t.Errorf("the container would get %q", out)
	}
}

func (r rebound) give(t *testing.T) {
	t.Helper()
	r.Must(t, "guestrebind", "give", r.address)
	r.check(t, r.own+" (null)")
	if left := r.Sh(t, "ls /run/rebound/rebind"); left != "" {
		t.Errorf("records still: %s", left)
	}
}

// refused checks that a command fails for a reason.
func (r rebound) refused(t *testing.T, do, why string) {
	t.Helper()
	if got := r.Run(t, "guestrebind", do, r.address); got.Code == 0 || !strings.Contains(got.Stderr, why) {
		t.Errorf("%s: code %d, %q; want %q", do, got.Code, got.Stderr, why)
	}
}

// up checks that an interface in state up is not taken from the host.
func (r rebound) up(t *testing.T) {
	name := strings.TrimSpace(r.Sh(t, "ls /sys/bus/pci/devices/"+r.address+"/net"))
	r.Must(t, "ip", "link", "set", name, "up")
	r.refused(t, "take", name)
	r.check(t, r.own+" (null)")
	r.Must(t, "ip", "link", "set", name, "down")
}

// killed kills each call before each of its writes. The next call continues, in either direction.
func (r rebound) killed(t *testing.T) {
	for step := range 3 {
		for _, then := range []string{"take", "give"} {
			if got := r.Run(t, "guestrebind", fmt.Sprintf("-dies=%d", step), "take", r.address); got.Code != 9 {
				t.Fatalf("taking: %+v", got)
			}
			if then == "take" {
				r.take(t)
			}
			r.give(t)
		}
		r.take(t)
		if got := r.Run(t, "guestrebind", fmt.Sprintf("-dies=%d", step), "give", r.address); got.Code != 9 {
			t.Fatalf("giving back: %+v", got)
		}
		r.give(t)
	}
}

// open checks that a function with an open descriptor is neither taken nor returned.
func (r rebound) open(t *testing.T) {
	r.take(t)
	user := r.Start(t, "guestuse", "vfio", r.address)
	user.Until(t, "ready")
	r.refused(t, "give", "guestuse")
	r.check(t, "vfio-pci vfio-pci")
	user.Stop(t)
	r.give(t)
	node := r.node(t)
	user = r.Start(t, "sh", "-c", "exec 3<"+node+"; echo ready; exec sleep 1000")
	user.Until(t, "ready")
	r.refused(t, "take", node)
	user.Stop(t)
}

// A pod of a claim, and the control group of its container.
const (
	podUID   = "5f1c9a52-7d0e-4c8e-9a57-0d2f6d0e1b11"
	podGroup = "/sys/fs/cgroup/kubepods.slice/kubepods-pod5f1c9a52_7d0e_4c8e_9a57_0d2f6d0e1b11.slice/c.scope"
)

// node returns the device node of the function's NVMe controller.
func (r rebound) node(t *testing.T) string {
	t.Helper()
	return "/dev/" + strings.TrimSpace(r.Sh(t, "ls /sys/bus/pci/devices/"+r.address+"/nvme"))
}

// openIn starts a process in a control group that has the function open under another name.
func (r rebound) openIn(t *testing.T, group string) *guest.Process {
	t.Helper()
	p := r.Start(t, "sh", "-euc", "mkdir -p "+group+"; echo $$ > "+group+"/cgroup.procs; mknod /root/$$ c $(cat /sys/class/nvme/"+path.Base(r.node(t))+"/dev | tr : ' '); exec 3</root/$$; echo ready; exec sleep 1000")
	p.Until(t, "ready")
	return p
}

// driverLog returns the messages of the kernel's NVMe driver, which writes some after each reset.
func (r rebound) driverLog(t *testing.T) string {
	t.Helper()
	return r.Sh(t, "dmesg | grep 'nvme nvme' || true")
}

// wasReset checks that the kernel has reset the function since driverLog returned a text.
func (r rebound) wasReset(t *testing.T, before string) {
	t.Helper()
	if got := strings.TrimSpace(r.Sh(t, "cat /sys/bus/pci/devices/"+r.address+"/reset_method")); got != "flr" {
		t.Errorf("reset_method %q", got)
	}
	if r.driverLog(t) == before {
		t.Errorf("the driver did not begin anew: the kernel said %q", before)
	}
	r.check(t, "nvme (null)")
}

// handsOver ends the claim of a pod with a running process. The function is withheld until the
// process has ended, and is then reset. A monitor has the function open all the time.
func (r rebound) handsOver(t *testing.T) {
	node := r.node(t)
	monitor, user := r.openIn(t, "/sys/fs/cgroup/monitor.slice"), r.openIn(t, podGroup)
	before := r.driverLog(t)
	keeper := r.Start(t, "guesthandover", r.address, podUID, "flr")
	keeper.Until(t, "which has ended: "+node+": process")
	user.Stop(t)
	if got := keeper.Wait(t); got.Code != 0 || !strings.HasSuffix(got.Stdout, "free\n") {
		t.Errorf("code %d\n%s%s", got.Code, got.Stdout, got.Stderr)
	}
	r.wasReset(t, before)
	monitor.Stop(t)
	keeper = r.Start(t, "guesthandover", r.address, podUID, "acpi")
	keeper.Until(t, "it cannot be reset: function "+r.address+": write \"acpi\" to reset_method: invalid argument")
	keeper.Stop(t)
}

// refuses removes the function's own driver: the kernel chooses another driver, or none.
func (r rebound) refuses(t *testing.T) {
	r.take(t)
	r.Must(t, "modprobe", "-r", "nvme")
	r.Must(t, "guestrebind", "give", r.address)
	r.check(t, "none (null)")
	r.Must(t, "modprobe", "nvme")
	r.check(t, "nvme (null)")
}

// reboot resets the guest in between. The kernel's state is lost then.
func (r rebound) reboot(t *testing.T) {
	r.Run(t, "guestrebind", "-dies=2", "take", r.address)
	file := strings.TrimSpace(r.Sh(t, "ls /run/rebound/rebind/*.json"))
	record := r.Sh(t, "cat "+file)
	r.Reset(t)
	r.WriteFile(t, file, record, 0o600) // as if the file were on a disk
	r.check(t, r.own+" (null)")
	r.give(t)
	r.take(t)
	r.give(t)
}

// before binds the function as an administrator. The binding stays.
func (r rebound) before(t *testing.T) {
	device := "/sys/bus/pci/devices/" + r.address
	r.Sh(t, "echo vfio-pci > "+device+"/driver_override; echo "+r.address+" > "+device+"/driver/unbind; echo "+r.address+" > /sys/bus/pci/drivers_probe")
	r.take(t)
	r.Must(t, "guestrebind", "give", r.address)
	r.check(t, "vfio-pci vfio-pci")
}
