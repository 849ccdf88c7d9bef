// Command vfiouser runs in guests. "vfiouser bundle" adds devices to an OCI bundle: it reads the
// output of chandler discover, writes a CDI spec with the product's code, and injects the devices.
// "vfiouser open" runs in the container. Like a virtual machine, it opens PCI functions through
// their IOMMU group, and prints the result of each step.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"

	runtimespec "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	product "chandler.dev/cdi"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "vfiouser:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) >= 2 && args[0] == "bundle":
		return bundle(os.Stdin, args[1], args[2:])
	case len(args) >= 3 && args[0] == "open":
		return json.NewEncoder(os.Stdout).Encode(openGroup(args[1], args[2:]))
	}
	return fmt.Errorf("usage: %s bundle DIR DEVICE... | open GROUP ADDRESS...", os.Args[0])
}

// found holds the used fields of the output of chandler discover.
type found struct {
	Devices []struct {
		Name  string
		Edits specs.ContainerEdits
	}
}

// claim is the UID of the claim of the CDI spec.
const claim = "0d0e0f10-0000-4000-8000-000000000001"

// bundle adds the named devices to the container of an OCI bundle. The bundle's config.json is
// runc's example.
func bundle(discovered io.Reader, dir string, names []string) error {
	var found found
	if err := json.NewDecoder(discovered).Decode(&found); err != nil {
		return err
	}
	var devices []product.Device
	var ids []string
	for i, name := range names {
		for _, d := range found.Devices {
			if d.Name == name {
				devices = append(devices, product.Device{Name: product.Name(claim, i, name, ""), Edits: d.Edits})
				ids = append(ids, product.ID(product.Name(claim, i, name, "")))
			}
		}
	}
	if len(ids) != len(names) {
		return fmt.Errorf("not all of %q were discovered", names)
	}
	specs := product.Dir{Path: filepath.Join(dir, "cdi")}
	if err := os.MkdirAll(specs.Path, 0o755); err != nil {
		return err
	}
	if err := specs.WriteClaim(claim, devices); err != nil {
		return err
	}
	file := filepath.Join(dir, "config.json")
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var container runtimespec.Spec
	if err := json.Unmarshal(data, &container); err != nil {
		return err
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(specs.Path), cdi.WithAutoRefresh(false))
	if err != nil {
		return err
	}
	if _, err := cache.InjectDevices(&container, ids...); err != nil {
		return fmt.Errorf("inject %q: %w", ids, err)
	}
	if data, err = json.Marshal(container); err != nil {
		return err
	}
	return os.WriteFile(file, data, 0o644)
}
