package driver

import (
	"fmt"
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool"
)

// manyGPUs is a driver with n GPUs on a real disk. The first GPUs are allocated to claims.
func manyGPUs(b *testing.B, n, held int) *bench {
	b.Helper()
	var gpus []rules.Offered
	for i := range n {
		gpus = append(gpus, gpu(fmt.Sprintf("gpu-%04d", i), int64(i)))
	}
	driver := newBench(b).restart().offers(gpus...)
	for i := range held {
		if _, err := driver.try(claim(fmt.Sprint("held-", i), gpus[i].Name)); err != nil {
			b.Fatal(err)
		}
	}
	return driver
}

// percentiles reports the 50th and the 99th percentile of durations, in milliseconds.
func percentiles(b *testing.B, what string, durations []time.Duration) {
	slices.Sort(durations)
	at := func(percent int) float64 {
		return float64(durations[(len(durations)-1)*percent/100]) / float64(time.Millisecond)
	}
	b.ReportMetric(at(50), what+"-p50-ms")
	b.ReportMetric(at(99), what+"-p99-ms")
}

// BenchmarkPrepare measures the driver's part of preparing and unpreparing: the checks, the record
// and the CDI spec on a real disk. It excludes the work of the kubelet and the library, such as
// reading the claim.
func BenchmarkPrepare(b *testing.B) {
	for _, size := range []struct{ claims, devices, held int }{
		{1, 1, 0}, {1, 1, 1000}, {1, 8, 0}, {1, 8, 1000}, {100, 1, 0}, {100, 1, 1000},
	} {
		b.Run(fmt.Sprintf("claims=%d/devices=%d/held=%d", size.claims, size.devices, size.held), func(b *testing.B) {
			driver := manyGPUs(b, size.held+size.claims*size.devices, size.held)
			var claims []*resourceapi.ResourceClaim
			var objects []kubeletplugin.NamespacedObject
			for i := range size.claims {
				var names []string
				for j := range size.devices {
					names = append(names, fmt.Sprintf("gpu-%04d", size.held+i*size.devices+j))
				}
				c := claim(fmt.Sprint("c-", i), names...)
				claims = append(claims, c)
				objects = append(objects, kubeletplugin.NamespacedObject{UID: c.UID, NamespacedName: types.NamespacedName{Namespace: c.Namespace, Name: c.Name}})
			}
			var prepared, unprepared []time.Duration
			for b.Loop() {
				began := time.Now()
				results, err := driver.PrepareResourceClaims(b.Context(), claims)
				prepared = append(prepared, time.Since(began))
				for _, result := range results {
					if err == nil {
						err = result.Err
					}
				}
				if err != nil {
					b.Fatal(err)
				}
				began = time.Now()
				failures, err := driver.UnprepareResourceClaims(b.Context(), objects)
				unprepared = append(unprepared, time.Since(began))
				for _, failure := range failures {
					if err == nil {
						err = failure
					}
				}
				if err != nil {
					b.Fatal(err)
				}
			}
			percentiles(b, "prepare", prepared)
			percentiles(b, "unprepare", unprepared)
		})
	}
}

// BenchmarkRestart measures the start of an agent: reading the records and comparing the CDI specs.
func BenchmarkRestart(b *testing.B) {
	driver := manyGPUs(b, 1000, 1000)
	for b.Loop() {
		driver.restart()
	}
}

// BenchmarkSlices measures the computation of the pool from a snapshot.
func BenchmarkSlices(b *testing.B) {
	driver := manyGPUs(b, 512, 0)
	for b.Loop() {
		in, _ := driver.poolInput(time.Now())
		if published, _ := pool.BuildPools(in); len(pool.SlicesOf(published)) != 8 {
			b.Fatal("not 8 slices of 64 devices")
		}
	}
}
