package main

import (
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// The column MODEL does not repeat the name of a device without a model.
func TestModelColumn(t *testing.T) {
	for _, model := range []string{"", "4xxx"} {
		d := discovery.Device{Name: "qat-dev0", Attributes: make(discovery.Attributes)}
		d.Attributes.SetString("model", model)
		if got := modelColumn(nil, 0).value(rules.Offered{Device: d}); got != model {
			t.Errorf("model %q is printed as %q", model, got)
		}
	}
}
