package scan

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// An observer of scans receives the duration of each scan, its late families, and the number of
// hanging reads, until these return.
func TestScansAreObserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := machine()
		slow := boards("nic", "2222")
		describe, block := slow.Describe, make(chan struct{})
		slow.Describe = func(host *discovery.Host, found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
			<-block
			return describe(host, found)
		}
		var mu sync.Mutex
		var last Result
		scans := 0
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			watch := Watch{Host: &discovery.Host{FS: host}, Families: []*discovery.Family{boards("gpu", "1111"), slow}, Observe: func(s Result) {
				mu.Lock()
				defer mu.Unlock()
				last, scans = s, scans+1
			}}
			watch.Run(ctx, func(*discovery.Snapshot) {})
		}()
		answer := host.block(label1)
		expect := func(after time.Duration, late []string, hanging int) {
			t.Helper()
			time.Sleep(after)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if scans == 0 || !slices.Equal(last.Late, late) || last.Hanging != hanging || last.Took < 0 {
				t.Errorf("after %d scans: %+v; want %v late and %d hanging", scans, last, late, hanging)
			}
		}
		expect(time.Minute, []string{"nic"}, 1)
		if last.Took > 15*time.Second {
			t.Errorf("a scan took %s", last.Took)
		}
		answer()
		expect(time.Minute, []string{"nic"}, 0)
		close(block)
		expect(time.Minute, nil, 0)
		cancel()
		<-ended
	})
}
