package web

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery/rules"
	"chandler.dev/internal/inventory"
)

// CompileClasses compiles the selectors of DeviceClasses.
func CompileClasses(of []resourceapi.DeviceClass) (classes []inventory.Class, err error) {
	for _, class := range of {
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
	return classes, nil
}
