// Command probe prints, from within a container, the devices and settings that the container was
// given. Its arguments are steps, which run in order. The first step that fails ends the command
// with status 1. Each line of output is one fact and begins with the kind of fact. Variables,
// device nodes and mounts that every container has are left out.
//
//	env ACCELERATOR=0000:03:00.0        environment variables, sorted
//	device c 10:232 0666 /dev/kvm       device nodes, sorted
//	mount /opt/vendor ext4 ro           mounts, sorted
//	metadata gpu pci-0000-03-00-0 family=amdgpu
//	                                    the metadata files: request, device, attribute
//	kvm 12                              the API version of /dev/kvm
//	api v1.37.0                         the version of the API server, read with the pod's service account
//	wait                                the command waits for SIGTERM, and then ends with status 0
package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
)

// steps maps names to steps.
var steps = map[string]func(out io.Writer) error{
	"api":      api,
	"devices":  func(out io.Writer) error { return devices(out, "/dev") },
	"env":      func(out io.Writer) error { return env(out, os.Environ()) },
	"kvm":      kvm,
	"metadata": func(out io.Writer) error { return metadata(out, metadataDir) },
	"mounts":   mounts,
	"wait":     wait,
}

func main() {
	if len(os.Args) < 2 {
		usage()
	}
	for _, name := range os.Args[1:] {
		if steps[name] == nil {
			usage()
		}
	}
	for _, name := range os.Args[1:] {
		if err := steps[name](os.Stdout); err != nil {
			fmt.Fprintf(os.Stderr, "probe: %s: %v\n", name, err)
			os.Exit(1)
		}
	}
}

func usage() {
	fmt.Fprintf(os.Stderr, "usage: probe STEP...\nsteps: %s\n", strings.Join(slices.Sorted(maps.Keys(steps)), ", "))
	os.Exit(2)
}
