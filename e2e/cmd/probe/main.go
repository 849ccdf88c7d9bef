// Command probe tells, from within a container, what the container was given. Its arguments are steps, taken in
// order; the first that fails ends it with status 1. It prints one fact a line, its kind first:
//
//	env ACCELERATOR=0000:03:00.0        environment variables, sorted; not those that every container has
//	device c 10:232 0666 /dev/kvm       device nodes, sorted; not those that every container has
//	mount /opt/vendor ext4 ro           mounts, sorted; not those that every container has
//	metadata gpu pci-0000-03-00-0 family=amdgpu
//	                                    what the metadata files say: request, device, attribute
//	kvm 12                              the API version that /dev/kvm answers
//	api v1.37.0                         the version of the cluster's API server, asked with the pod's service account
//	wait                                it is waiting for SIGTERM, and ends with status 0 then
package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
)

// steps by name.
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
