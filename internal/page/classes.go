package page

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/yaml"

	"chandler.dev/discovery/rules"
	"chandler.dev/internal/inventory"
)

// Classes compiles the DeviceClasses in YAML documents.
func Classes(manifests []byte) (classes []inventory.Class, err error) {
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(manifests), 4096)
	for {
		var class resourceapi.DeviceClass
		if err := decoder.Decode(&class); errors.Is(err, io.EOF) {
			return classes, nil
		} else if err != nil {
			return nil, fmt.Errorf("device classes: %w", err)
		}
		if class.Kind != "DeviceClass" {
			continue
		}
		c := inventory.Class{Name: class.Name}
		if class.Spec.ExtendedResourceName != nil {
			c.Resource = *class.Spec.ExtendedResourceName
		}
		for _, selector := range class.Spec.Selectors {
			if selector.CEL == nil {
				continue
			}
			compiled, err := rules.Compile(selector.CEL.Expression)
			if err != nil {
				return nil, fmt.Errorf("device class %s: %w", class.Name, err)
			}
			c.Selectors = append(c.Selectors, compiled)
			c.Length += len(selector.CEL.Expression)
		}
		classes = append(classes, c)
	}
}
