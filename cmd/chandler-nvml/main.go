//go:build cgo

// Command chandler-nvml says what NVML, NVIDIA's management library, knows of
// this host's GPUs, as package facts writes it, a line at a time. It is a program
// of its own since NVML needs cgo and the C library, and may hang or crash:
// chandler runs it where it is there, ends it when it is silent, and does
// without it where it is not.
//
// It changes nothing on a GPU. To read them it must be able to open
// /dev/nvidia*, and while it watches it holds them open, so that GPUs are reset,
// and the driver is unloaded, only when it has ended.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

type options struct {
	driverRoot string
	gpus       string
	interval   time.Duration
	watch      bool
}

func main() {
	var o options
	flag.StringVar(&o.driverRoot, "driver-root", "/", "`directory` below which the driver's libraries lie; where they are not, the system's are used")
	flag.StringVar(&o.gpus, "gpus", "/proc/driver/nvidia/gpus", "`directory` that lists the GPUs by their PCI addresses")
	flag.DurationVar(&o.interval, "interval", 10*time.Second, "how long to wait for an error of a GPU until looking again")
	flag.BoolVar(&o.watch, "watch", false, "go on for as long as standard input is open")
	flag.Parse()
	done := make(chan error, 2)
	go func() { done <- o.run(os.Stdout) }()
	if o.watch {
		// A call of NVML may never return; who started this program may be gone.
		go func() {
			_, err := io.Copy(io.Discard, os.Stdin)
			done <- err
		}()
	}
	if err := <-done; err != nil {
		fmt.Fprintln(os.Stderr, "chandler-nvml:", err)
		os.Exit(1)
	}
}

func (o *options) run(out io.Writer) error {
	lib := nvml.New(nvml.WithLibraryPath(library(o.driverRoot)))
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return fmt.Errorf("load NVML: %s", describe(ret))
	}
	addresses, err := listed(o.gpus)
	if err != nil {
		return err
	}
	r, err := newReader(lib, addresses)
	if err != nil {
		return err
	}
	if !o.watch {
		return r.write(out)
	}
	return r.watch(out, o)
}

// libraryDirs are where distributions, and NVIDIA's and Google's installers,
// put the driver's libraries.
var libraryDirs = []string{
	"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu",
	"lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu",
}

const libraryName = "libnvidia-ml.so.1"

// library returns the path of NVML below a root, or its name alone, by which the
// dynamic linker finds it where the system has it.
func library(root string) string {
	for _, dir := range libraryDirs {
		file := filepath.Join(root, dir, libraryName)
		if _, err := os.Stat(file); err == nil {
			return file
		}
	}
	return libraryName
}

// listed returns the PCI addresses of the GPUs that the kernel driver has.
func listed(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, errors.New("list GPUs: NVIDIA's kernel driver is not loaded")
	}
	if err != nil {
		return nil, fmt.Errorf("list GPUs: %w", err)
	}
	addresses := make([]string, len(entries))
	for i, entry := range entries {
		addresses[i] = entry.Name()
	}
	return addresses, nil
}

// describe returns what NVML's answer means. NVML's own words are for answers
// that it gave itself.
func describe(ret nvml.Return) string {
	switch ret {
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return "there is no " + libraryName + " that can be loaded"
	case nvml.ERROR_NO_PERMISSION:
		return "/dev/nvidia* cannot be opened: permission denied"
	}
	return fmt.Sprintf("%s (%d)", nvml.ErrorString(ret), ret)
}
