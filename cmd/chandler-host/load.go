//go:build cgo && !nvmlmock

package main

import (
	"path/filepath"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// load returns the library, which Init loads.
func (o *options) load() nvml.Interface {
	return nvml.New(nvml.WithLibraryPath(libraryPath(filepath.Join(o.hostRoot, o.driverRoot))))
}
