package passthroughtest

import (
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// look is the interval between checks of the host's files for writes.
const look = 5 * time.Millisecond

// At creates a simulated host in a directory for agents in processes of their own: writes to
// attribute files take effect shortly afterwards, until the test ends. Nodes below dev are real,
// which requires root. Unlike a kernel, the model cannot refuse a write.
func At(t testing.TB, dir string) *Kernel {
	k := layHost(t, dir, true)
	leases := make(map[string]*os.File)
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			k.leaseVirtual(leases)
			k.applyWrites()
			select {
			case <-end:
				return
			case <-time.After(look):
			}
		}
	}()
	t.Cleanup(func() {
		close(end)
		<-ended
		for _, file := range leases {
			file.Close()
		}
	})
	return k
}

// attributes are the patterns of the checked attribute files, in the order of the agents' writes.
var attributes = []string{
	"sys/devices/*/*/*/driver_override",
	"sys/bus/pci/drivers/*/unbind", "sys/bus/pci/drivers/*/bind", "sys/bus/pci/drivers_probe",
}

// applyWrites applies the writes. It reads the files in reverse order: a process that wrote a later
// attribute has written the earlier ones.
func (k *Kernel) applyWrites() {
	type written struct{ name, value string }
	var all []written
	for _, pattern := range slices.Backward(attributes) {
		names, _ := filepath.Glob(filepath.Join(k.Dir, pattern)) // the pattern is well-formed
		for _, file := range names {
			name := strings.TrimPrefix(file, k.Dir+"/")
			text, err := os.ReadFile(file)
			value, whole := strings.CutSuffix(string(text), "\n")
			if err == nil && whole && k.isNews(name, value) {
				all = append(all, written{name, value})
			}
		}
	}
	for _, w := range slices.Backward(all) {
		if strings.HasPrefix(w.name, "sys/bus/") {
			k.File(w.name, "") // as the attribute reads after a write
		}
		_ = k.Write(w.name, w.value) // the writer gets no error
	}
}

// leaseVirtual creates or removes virtual functions while a process opens sriov_numvfs for writing,
// because a kernel has finished the change when the write ends. Opening a leased file waits for the
// end of the lease (fcntl(2)). The written value is not known yet, so leaseVirtual uses
// [Physical.Makes], or 0 if there are virtual functions.
func (k *Kernel) leaseVirtual(leases map[string]*os.File) {
	k.mu.Lock()
	all := slices.Collect(maps.Values(k.physical))
	k.mu.Unlock()
	for _, p := range all {
		file := leases[p.Address]
		if file == nil {
			opened, err := os.Open(filepath.Join(k.Dir, Source(p.Address), "sriov_numvfs"))
			if err != nil {
				continue
			}
			if _, err := unix.FcntlInt(opened.Fd(), unix.F_SETLEASE, unix.F_RDLCK); err != nil {
				opened.Close() // another process is writing
				continue
			}
			leases[p.Address] = opened
			if text, err := io.ReadAll(opened); err == nil && strings.TrimSpace(string(text)) != k.numVFs(p.Address) { // written without a lease
				_ = k.Write(Source(p.Address)+"/sriov_numvfs", strings.TrimSpace(string(text)))
			}
			continue
		}
		if is, err := unix.FcntlInt(file.Fd(), unix.F_GETLEASE, 0); err != nil || is == unix.F_RDLCK {
			continue
		}
		count := 0
		if k.VirtualCount(p.Address) == 0 {
			count = p.Makes
		}
		_ = k.Write(Source(p.Address)+"/sriov_numvfs", strconv.Itoa(count)) // the writer gets no error
		file.Close()
		delete(leases, p.Address)
	}
}

// isNews reports whether the file has a written value instead of the kernel's own text.
func (k *Kernel) isNews(name, value string) bool {
	return (value == "") == (path.Base(name) == "driver_override")
}
