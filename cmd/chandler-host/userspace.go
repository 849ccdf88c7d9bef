//go:build cgo

package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	securejoin "github.com/cyphar/filepath-securejoin"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery/families/nvidia/userspace"
)

// runUserspace writes the answer of NVIDIA's CDI code for the driver root, once or repeatedly. It
// loads no library of the root and opens no device node.
func (o *options) runUserspace(out io.Writer) error {
	for {
		text, err := o.userspaceFiles()
		if err != nil {
			return err
		}
		if _, err := out.Write(append(text, '\n')); err != nil || !o.watch {
			return err
		}
		time.Sleep(o.interval)
	}
}

func (o *options) userspaceFiles() ([]byte, error) {
	host, err := filepath.EvalSymlinks(o.hostRoot)
	if err != nil {
		return nil, err
	}
	// NVIDIA's code follows links, and derives a file's place in the container from the beginning
	// of its path. Therefore it gets the root with all links resolved, none of which leads out of
	// the host's files.
	root, err := securejoin.SecureJoin(host, o.driverRoot)
	if err != nil {
		return nil, fmt.Errorf("driver root: %w", err)
	}
	edits, err := commonEdits(root)
	if err != nil {
		return nil, fmt.Errorf("driver root %s: %w", o.driverRoot, err)
	}
	answer := userspace.Answer{Edits: specs.ContainerEdits{Env: edits.Env, Hooks: edits.Hooks}}
	answer.Driver = driverOf(edits)
	for _, m := range edits.Mounts {
		// An absolute link below the root leads to its target where the root is "/".
		if userspace.IsBelow(m.HostPath, root) {
			m.HostPath = filepath.Join("/", o.driverRoot, strings.TrimPrefix(m.HostPath, root)) // the family's path of the root
			answer.Edits.Mounts = append(answer.Edits.Mounts, m)
		}
	}
	return userspace.Format(answer)
}

// commonEdits returns the edits of NVIDIA's code for all containers with a GPU and a driver root.
// Device nodes are left out, because they depend on the GPU.
//
// By default, NVIDIA's code would load two libraries below the root and initialise them
// (nvidia-container-toolkit v1.20.1, pkg/nvcdi/lib.go): sandboxutils, which is disabled here, and
// NVML, which is replaced by a failing implementation. The code then reads the version in the name
// of libcuda.so.VERSION (internal/lookup/root/root.go). The code would also search the directories
// of environment variables, which are the agent's and unrelated to the root.
func commonEdits(root string) (*specs.ContainerEdits, error) {
	for _, name := range []string{"PATH", "XDG_DATA_DIRS"} {
		if err := os.Unsetenv(name); err != nil {
			return nil, err
		}
	}
	lib, err := nvcdi.New(
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithDriverRoot(root),
		nvcdi.WithNvmlLib(refusing{}),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
		nvcdi.WithNVIDIACDIHookPath(userspace.HookProgram),
		nvcdi.WithLogger(silent{}),
	)
	if err != nil {
		return nil, err
	}
	edits, err := lib.GetCommonEdits()
	if err != nil {
		return nil, err
	}
	return edits.ContainerEdits, nil
}

// driverOf returns the driver version, which is an argument of the hook for CUDA's compat
// libraries.
func driverOf(edits *specs.ContainerEdits) string {
	for _, h := range edits.Hooks {
		for _, arg := range h.Args {
			if version, ok := strings.CutPrefix(arg, "--host-driver-version="); ok {
				return version
			}
		}
	}
	return ""
}

// refusing is an NVML whose initialisation fails. No other function of it is called.
type refusing struct{ nvml.Interface }

func (refusing) Init() nvml.Return { return nvml.ERROR_LIBRARY_NOT_FOUND }

// silent drops the log of NVIDIA's code, which has a line for each missing file: most of them are
// missing on any host.
type silent struct{}

func (silent) Debugf(string, ...any)   {}
func (silent) Errorf(string, ...any)   {}
func (silent) Infof(string, ...any)    {}
func (silent) Warningf(string, ...any) {}
func (silent) Tracef(string, ...any)   {}
