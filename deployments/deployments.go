// Package deployments holds the manifests that install Chandler, for the parts of
// it that say how to use them.
package deployments

import (
	"bytes"
	_ "embed"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"
)

//go:embed deviceclasses.yaml
var deviceClasses []byte

// DeviceClasses returns the classes that claims can ask for.
func DeviceClasses() ([]resourceapi.DeviceClass, error) { return ParseDeviceClasses(deviceClasses) }

// ParseDeviceClasses returns the classes of YAML documents that hold nothing else.
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
