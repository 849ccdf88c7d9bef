package rebindtest

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

// look is how often it is looked for what was written to the host's files.
const look = 5 * time.Millisecond

// At lays a host out in a directory for agents that are processes of their own: what they write to the
// files of attributes takes effect a little later, until the test ends. Nodes below dev are real, which
// takes root. Unlike a kernel, it cannot refuse a write.
func At(t testing.TB, dir string) *Kernel {
	k := lay(t, dir, true)
	leases := make(map[string]*os.File)
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			k.lease(leases)
			k.obey()
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

// attributes are those whose files are looked at, in the order in which agents write them.
var attributes = []string{
	"sys/devices/*/*/*/driver_override",
	"sys/bus/pci/drivers/*/unbind", "sys/bus/pci/drivers/*/bind", "sys/bus/pci/drivers_probe",
}

// obey does what was written. It looks in the reverse order: whoever wrote a later attribute has written
// the earlier ones.
func (k *Kernel) obey() {
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
			k.File(w.name, "") // as it reads again
		}
		_ = k.Write(w.name, w.value) // whoever wrote it is not told
	}
}

// lease makes and removes virtual functions while somebody opens sriov_numvfs to write it, since a kernel has
// done that when the write ends. Whoever opens a file on which there is a lease waits for its end (fcntl(2)).
// The value is not known yet. It is taken to be that of [Physical.Makes], or 0 if there are virtual functions.
func (k *Kernel) lease(leases map[string]*os.File) {
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
				opened.Close() // somebody is writing
				continue
			}
			leases[p.Address] = opened
			if text, err := io.ReadAll(opened); err == nil && strings.TrimSpace(string(text)) != k.numVFs(p.Address) { // while there was no lease
				_ = k.Write(Source(p.Address)+"/sriov_numvfs", strings.TrimSpace(string(text)))
			}
			continue
		}
		if is, err := unix.FcntlInt(file.Fd(), unix.F_GETLEASE, 0); err != nil || is == unix.F_RDLCK {
			continue
		}
		count := 0
		if k.Virtual(p.Address) == 0 {
			count = p.Makes
		}
		_ = k.Write(Source(p.Address)+"/sriov_numvfs", strconv.Itoa(count)) // whoever writes is not told
		file.Close()
		delete(leases, p.Address)
	}
}

// isNews reports whether a file holds what was written to it, and not what the kernel says.
func (k *Kernel) isNews(name, value string) bool {
	return (value == "") == (path.Base(name) == "driver_override")
}
