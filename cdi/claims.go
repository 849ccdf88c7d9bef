// Package cdi writes CDI specs. It handles their file names, CDI names and lifetime, independently
// of DRA and the device plugin API.
package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

// Vendor and Class form the kind of claims' specs.
const (
	Vendor = discovery.Domain
	Class  = "claim"
)

// A claim's spec is chandler.dev-claim_<uid>.json, the CDI library's name for transient specs.
const (
	prefix    = Vendor + "-" + Class + "_"
	extension = ".json"
)

// Dir is a directory of CDI specs that a container runtime reads. Specs of different claims can be
// written concurrently, but each claim only by one caller at a time.
type Dir struct {
	Path string // such as "/var/run/cdi"

	// RuntimeRoot is the path at which the container runtime sees the root of the scanned host, ""
	// if the paths are the same.
	RuntimeRoot string

	// Files writes the specs; use its zero value.
	Files disk.Files
}

// Device is one CDI device of a spec.
type Device struct {
	Name   string // in a claim's spec, a name from [Name]
	Family string // only in specs of devices with their own names; see [Dir.DevicesSpecs]
	Edits  specs.ContainerEdits
}

// Name returns the name of the CDI device for one allocation result of a claim. The name is never
// reused for another device, so that runtimes cannot have a wrong device in a cache.
func Name(uid types.UID, result int, device string, share types.UID) string {
	name := fmt.Sprintf("%s-%d-%s", uid, result, device)
	if share != "" {
		name += "-" + string(share)
	}
	return name
}

// ID returns the fully qualified name of a claim's CDI device, for container runtimes:
// "chandler.dev/claim=<name>".
func ID(name string) string { return parser.QualifiedName(Vendor, Class, name) }

// id matches the prefix before the device name in the name of a CDI device. UIDs of the API server
// have the first form.
var id = regexp.MustCompile(`^([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|.+?)-[0-9]+-(.+)$`)

// ParseID returns the claim and the device of a fully qualified name, if the name is one of ours. A
// share ID at the end is removed.
func ParseID(qualified string) (uid types.UID, device string, ok bool) {
	name, ours := strings.CutPrefix(qualified, Vendor+"/"+Class+"=")
	found := id.FindStringSubmatch(name)
	if !ours || found == nil {
		return "", "", false
	}
	return types.UID(found[1]), share.ReplaceAllString(found[2], ""), true
}

// WriteClaim writes the spec of a claim, unless the spec on disk is already the same. It replaces an
// earlier spec of the claim.
func (d Dir) WriteClaim(uid types.UID, devices []Device) error {
	data, err := d.renderClaim(uid, devices)
	if err != nil {
		return fmt.Errorf("CDI spec of claim %s: %w", uid, err)
	}
	// Runtimes may not run as root, and the spec contains no secret.
	if err := d.Files.UpdateFile(d.file(uid), data, 0o644); err != nil {
		return fmt.Errorf("write CDI spec %s: %w", d.file(uid), err)
	}
	return nil
}

// RemoveClaim removes the spec of a claim, and succeeds if there is none.
func (d Dir) RemoveClaim(uid types.UID) error {
	if checkUID(uid) != nil {
		return nil // never written
	}
	if err := d.Files.Remove(d.file(uid)); err != nil {
		return fmt.Errorf("remove CDI spec %s: %w", d.file(uid), err)
	}
	return nil
}

// Claims returns the UIDs of the claims with a spec, in order. Other files are ignored.
func (d Dir) Claims() ([]types.UID, error) {
	entries, err := d.Files.ListDir(d.Path)
	if err != nil {
		return nil, fmt.Errorf("list CDI specs: %w", err)
	}
	var uids []types.UID
	for _, entry := range entries {
		uid, ours := strings.CutPrefix(entry.Name(), prefix)
		uid, spec := strings.CutSuffix(uid, extension)
		if ours && spec && entry.Type().IsRegular() && checkUID(types.UID(uid)) == nil {
			uids = append(uids, types.UID(uid))
		}
	}
	slices.Sort(uids)
	return uids, nil
}

// share matches a share ID at the end of a name.
var share = regexp.MustCompile(`-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// ClaimDevices returns the devices of a claim's spec, with the names that the CDI names contain,
// for use when all other records are lost. A name that may end in a share ID is returned with and
// without its end.
func (d Dir) ClaimDevices(uid types.UID) (devices []Device, err error) {
	data, err := d.Files.Read(d.file(uid))
	if err != nil {
		return nil, fmt.Errorf("read CDI spec: %w", err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return nil, fmt.Errorf("parse CDI spec %s: %w", d.file(uid), err)
	}
	for _, device := range spec.Devices {
		rest, ok := strings.CutPrefix(device.Name, string(uid)+"-")
		index, name, _ := strings.Cut(rest, "-")
		if _, err := strconv.Atoi(index); !ok || err != nil || name == "" {
			continue
		}
		devices = append(devices, Device{Name: name, Edits: device.ContainerEdits})
		if shared := share.ReplaceAllString(name, ""); shared != name && shared != "" {
			devices = append(devices, Device{Name: shared, Edits: device.ContainerEdits})
		}
	}
	return devices, nil
}

// RemoveTemporary removes temporary files of a given age that writers left behind; see
// [disk.Files.SweepTemporary].
func (d Dir) RemoveTemporary(age time.Duration) error {
	return d.Files.SweepTemporary(d.Path, age, Vendor+"-")
}

func (d Dir) file(uid types.UID) string {
	return filepath.Join(d.Path, prefix+string(uid)+extension)
}

// checkUID returns an error if a UID cannot be part of a file name and a CDI name.
func checkUID(uid types.UID) error {
	if err := parser.ValidateDeviceName(string(uid)); err != nil {
		return fmt.Errorf("UID %q: %w", uid, err)
	}
	return nil
}

// renderClaim returns the bytes of a claim's spec.
func (d Dir) renderClaim(uid types.UID, devices []Device) ([]byte, error) {
	if err := checkUID(uid); err != nil {
		return nil, err
	}
	return d.renderSpec(Class, nil, devices)
}

// renderSpec returns a spec's bytes, which are the same for the same devices. The hooks apply to
// every container with one of the devices.
func (d Dir) renderSpec(class string, hooks []*specs.Hook, devices []Device) ([]byte, error) {
	spec := &specs.Spec{Kind: Vendor + "/" + class, Devices: []specs.Device{}, ContainerEdits: specs.ContainerEdits{Hooks: hooks}}
	for _, device := range devices {
		edits := RebasePaths(device.Edits, d.RuntimeRoot)
		edits.DeviceNodes = firstOfPath(edits.DeviceNodes)
		spec.Devices = append(spec.Devices, specs.Device{Name: device.Name, ContainerEdits: edits})
	}
	// Runtimes refuse specs of newer versions, so the spec has the lowest possible version.
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, fmt.Errorf("minimum version: %w", err)
	}
	spec.Version = version
	if err := validate(spec); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(spec); err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return out.Bytes(), nil
}

// validate returns an error if a runtime would not load the spec: because of one invalid device,
// runtimes skip all devices of a file.
func validate(spec *specs.Spec) error {
	if len(spec.Devices) == 0 {
		return errors.New("no devices")
	}
	all := cdi.ContainerEdits{ContainerEdits: &spec.ContainerEdits}
	if err := all.Validate(); err != nil {
		return fmt.Errorf("container edits: %w", err)
	}
	seen := make(map[string]bool)
	for _, device := range spec.Devices {
		if seen[device.Name] {
			return fmt.Errorf("device %s: twice in the spec", device.Name)
		}
		seen[device.Name] = true
		if err := parser.ValidateDeviceName(device.Name); err != nil {
			return fmt.Errorf("device %s: name: %w", device.Name, err)
		}
		edits := cdi.ContainerEdits{ContainerEdits: &device.ContainerEdits}
		if err := edits.Validate(); err != nil {
			return fmt.Errorf("device %s: container edits: %w", device.Name, err)
		}
	}
	return nil
}

// firstOfPath returns the nodes without repeated container paths.
func firstOfPath(nodes []*specs.DeviceNode) []*specs.DeviceNode {
	seen := make(map[string]bool)
	return slices.DeleteFunc(nodes, func(node *specs.DeviceNode) bool {
		repeated := seen[node.Path]
		seen[node.Path] = true
		return repeated
	})
}
