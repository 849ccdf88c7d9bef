package discovery_test

import (
	"testing"

	"chandler.dev/discovery"
)

// FuzzVersion checks that every published version is a semantic version.
func FuzzVersion(f *testing.F) {
	for _, seed := range []string{"535.104.05", "550.120", "6.8.5-custom", "1.2.3.4", "..", "999999999.999999999.999999999", "1.2\n"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		d := discovery.Device{Name: "a", Attributes: discovery.Attributes{}}
		d.Attributes.SetVersion("driverVersion", text)
		d.Attributes.SetString("model", text)
		if err := d.Validate(); err != nil {
			t.Error(err)
		}
	})
}
