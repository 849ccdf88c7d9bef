package replaced

import (
	"os"
	"strings"
	"testing"
)

// Each driver has devices of Chandler's families or the reason why there are none, and each class belongs
// to a driver and has a counterpart, which the chart installs, exactly if the driver has devices.
func TestTable(t *testing.T) {
	chart, err := os.ReadFile("../../../deployments/helm/chandler/templates/deviceclasses.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range Drivers {
		if served := d.Unserved == ""; served != (d.Devices != "") || served != (len(d.Families) > 0) {
			t.Errorf("%s: devices %q of %q, reason %q", d.Name, d.Devices, d.Families, d.Unserved)
		}
	}
	for name, class := range Classes {
		d := DriverOf(class.Driver)
		if d == nil || (d.Unserved == "") != (class.Own != "") {
			t.Errorf("%s: class %q of driver %q", name, class.Own, class.Driver)
		}
		if !strings.Contains(string(chart), class.Own) {
			t.Errorf("%s: the chart has no class %s", name, class.Own)
		}
		if !IsMentioned("device.driver == '"+class.Driver+"'") || !IsMentioned(name) || IsMentioned(name+".example.com") {
			t.Errorf("%s: not recognized as a whole word", name)
		}
	}
}
