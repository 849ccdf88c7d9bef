package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"chandler.dev/e2e/chandler"
)

// manyDevices is the number of devices that are published at once.
const manyDevices = 512

// scanInterval is the agent's scan interval while changes of the host are measured. The kernel
// sends no uevents for the simulated host. On a real host, a uevent starts a scan as soon as the
// kernel has been silent for 200 ms.
const scanInterval = 100 * time.Millisecond

// measureSlices measures the time until slices are in the API server, from the start of the agent
// and from a change of the host.
func (b *bench) measureSlices(ctx context.Context) error {
	if err := b.simulate(manyDevices, 0); err != nil {
		return err
	}
	a := b.chandlerAgent("Chandler", manyDevices, "--rescan-interval="+scanInterval.String())
	var started, sick timings
	for round := range b.rounds {
		b.say("round %d of %d", round+1, b.rounds)
		if err := b.measurePublishing(ctx, a, round, &started, &sick); err != nil {
			return err
		}
	}
	b.table(fmt.Sprintf("Slices of %d devices, p50 / p99 in ms:", manyDevices), []string{"", "ms"}, [][]string{
		{"from the start of the agent until the API server has all", started.String()},
		{fmt.Sprintf("from a missing device node until its slice says so, with a scan every %s", scanInterval), sick.String()},
	})
	return nil
}

func (b *bench) measurePublishing(ctx context.Context, a *agent, round int, started, sick *timings) (err error) {
	slices, err := b.watchSlices(ctx, a.driver)
	if err != nil {
		return err
	}
	defer slices.watch.Stop()
	began := time.Now()
	r, err := b.launch(ctx, a)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.stop(), b.forget(ctx, a)) }()
	if err := slices.until(ctx, func() bool { return slices.devices() == a.devices }); err != nil {
		return err
	}
	*started = append(*started, time.Since(began))
	// Change one device in each slice of 64, and other devices in the next round.
	for number := round; number < a.devices; number += comparedDevices {
		gpu := newGPU(number)
		file := filepath.Join(b.cluster.NodePath(chandler.HostDir), gpu.renderNode())
		began := time.Now()
		if err := os.Rename(file, file+".gone"); err != nil {
			return err
		}
		if err := slices.until(ctx, func() bool { return slices.tainted(gpu.device()) }); err != nil {
			return err
		}
		*sick = append(*sick, time.Since(began))
		if err := os.Rename(file+".gone", file); err != nil {
			return err
		}
	}
	return nil
}

// watchedSlices are the slices of a driver, as the API server reports them.
type watchedSlices struct {
	watch watch.Interface
	known map[string]*resourceapi.ResourceSlice
}

func (b *bench) watchSlices(ctx context.Context, driver string) (*watchedSlices, error) {
	w, err := b.kube.ResourceV1().ResourceSlices().Watch(ctx, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + driver})
	return &watchedSlices{watch: w, known: make(map[string]*resourceapi.ResourceSlice)}, err
}

// until waits until is returns true for the reported slices.
func (s *watchedSlices) until(ctx context.Context, is func() bool) error {
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	for !is() {
		select {
		case event, open := <-s.watch.ResultChan():
			slice, ok := event.Object.(*resourceapi.ResourceSlice)
			switch {
			case !open || !ok:
				return fmt.Errorf("watch of ResourceSlices ended: %v", event.Object)
			case event.Type == watch.Deleted:
				delete(s.known, slice.Name)
			default:
				s.known[slice.Name] = slice
			}
		case <-timeout.C:
			return errors.New("the slices did not become as they should")
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// devices returns the number of devices in slices of the newest generation of their pool.
func (s *watchedSlices) devices() int {
	newest := make(map[string]int64) // generations of pools
	for _, slice := range s.known {
		newest[slice.Spec.Pool.Name] = max(newest[slice.Spec.Pool.Name], slice.Spec.Pool.Generation)
	}
	n := 0
	for _, slice := range s.known {
		if slice.Spec.Pool.Generation == newest[slice.Spec.Pool.Name] {
			n += len(slice.Spec.Devices)
		}
	}
	return n
}

// tainted reports whether a device has a taint.
func (s *watchedSlices) tainted(name string) bool {
	for _, slice := range s.known {
		for _, device := range slice.Spec.Devices {
			if device.Name == name && len(device.Taints) > 0 {
				return true
			}
		}
	}
	return false
}
