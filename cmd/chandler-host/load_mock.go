//go:build cgo && nvmlmock

package main

import (
	"cmp"
	"os"
	"path/filepath"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/gpus"

	"chandler.dev/cmd/chandler-host/mocked"
)

// load returns a fake NVML with an H100 at 0000:00:00.0 and an A100 at 0000:01:00.0, both in MIG
// mode, for tests on a whole cluster: see package mocked. The state is in the directory of an
// environment variable, or else in the host's root.
//
// The creation or removal of an instance pauses while the directory has a file with the name of the
// next step, such as "create-ci". Tests can thus end a process in the middle of a change.
func (o *options) load() nvml.Interface {
	dir := cmp.Or(os.Getenv("CHANDLER_NVML_MOCKED"), o.hostRoot)
	m, err := mocked.New(dir, gpus.H100_SXM5_80GB, gpus.A100_SXM4_40GB)
	if err != nil {
		return &mock.Interface{InitFunc: func() nvml.Return { return nvml.ERROR_UNKNOWN }}
	}
	m.Before = func(step string) nvml.Return {
		for {
			if _, err := os.Stat(filepath.Join(dir, step)); err != nil {
				return nvml.SUCCESS
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return m
}
