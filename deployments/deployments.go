// Package deployments embeds installation manifests for use by the program.
package deployments

import (
	"bytes"
	_ "embed"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"
)

//go:embed examples/deviceclasses-all.yaml
var deviceClasses []byte

// DeviceClasses returns the DeviceClasses of all families.
func DeviceClasses() ([]resourceapi.DeviceClass, error) { return ParseDeviceClasses(deviceClasses) }

// ParseDeviceClasses parses YAML documents with DeviceClasses and no other objects.
func ParseDeviceClasses(manifest []byte) (classes []resourceapi.DeviceClass, err error) {
	for document := range bytes.SplitSeq(manifest, []byte("\n---\n")) {
		var class resourceapi.DeviceClass
		if err := yaml.UnmarshalStrict(document, &class); err != nil {
			return nil, fmt.Errorf("device classes: %w", err)
		}
		classes = append(classes, class)
	}
	return classes, nil
}
