package agent

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/vfio"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// addBlockDevice adds the disk of the function to the kernel.
func (r *rebinding) addBlockDevice() {
	r.File(passthroughtest.Source(diskFunction)+"/nvme/nvme0/nvme0n1/dev", "259:1\n")
	r.Link("sys/class/block/nvme0n1", "../../"+strings.TrimPrefix(passthroughtest.Source(diskFunction), "sys/")+"/nvme/nvme0/nvme0n1")
}

const (
	rootMount = "22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
	dataMount = "36 22 259:1 / /data rw,relatime shared:2 - ext4 /dev/nvme0n1 rw\n"
)

// A disk that is available only under vfio has a taint while the host has it mounted. No
// kernel event announces a mount.
func TestAgentTaintsMountedDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		r.families = []*discovery.Family{vfio.Family}
		r.addBlockDevice()
		r.File("proc/1/mountinfo", rootMount+dataMount)
		config := r.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.AllEvents = true // so that a scan at the interval reads only files whose changes cause no events
		config.Uevents = func(ctx context.Context, events chan scan.Changes) error {
			scan.Changes{Everything: true}.Send(events)
			<-ctx.Done()
			return nil
		}
		stop := r.run(config)
		r.offers(diskName, "")
		const taint = diskName + " chandler.dev/unhealthy: "
		if got := r.taint(); got != taint {
			t.Errorf("mounted: taint %q, want %q", got, taint)
		}
		early := r.claim("early", discovery.DriverVFIO)
		r.refuses(early, "it is mounted on /data")
		r.unprepare(early)
		r.File("proc/1/mountinfo", rootMount)
		time.Sleep(time.Minute + 10*time.Second)
		synctest.Wait()
		if got := r.taint(); got != "" {
			t.Errorf("unmounted: taint %q", got)
		}
		r.File("proc/1/mountinfo", rootMount+dataMount)
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := r.taint(); got != taint {
			t.Errorf("mounted again: taint %q, want %q", got, taint)
		}
		r.File("proc/1/mountinfo", rootMount)
		time.Sleep(time.Minute + 10*time.Second)
		vm := r.claim("vm", discovery.DriverVFIO)
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := r.taint(); got != "" {
			t.Errorf("allocated under vfio: taint %q", got)
		}
		r.unprepare(vm)
		stop()
	})
}

// A disk that pods may also use with its own driver has no taint for a mount: the mount may belong
// to a pod.
func TestAgentAllowsMountOfDiskWithItsOwnDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		r.addBlockDevice()
		r.File("proc/1/mountinfo", rootMount+dataMount)
		stop := r.run(r.config(&rules.Rules{Mode: discovery.ModeDRA}))
		r.offers(diskName, "")
		if got := r.taint(); got != "" {
			t.Errorf("taint %q", got)
		}
		stop()
	})
}
