package discovery

import (
	"strings"
	"testing"
)

// acceptDriver decides which devices accept VFIO passthrough and which accept only that.
func TestAcceptDriver(t *testing.T) {
	accept := JoinAcceptors([]*Family{{Name: "gpu", Parameters: []Parameter{"other"}}})
	under := Attributes{}
	under.SetString("driver", "mlx5_vfio_pci")
	shared := Capacity{}
	shared.Set(Shares, 4)
	rebindable := &PassthroughOption{Driver: "vfio-pci"}
	vfio := Parameters{Driver: DriverVFIO}
	for name, test := range map[string]struct {
		d    Device
		ask  Parameters
		want string // in the error, "" for none
	}{
		"as it is":                  {Device{Passthrough: rebindable}, nil, ""},
		"rebound":                   {Device{Passthrough: rebindable}, vfio, ""},
		"under vfio already":        {Device{Attributes: under}, vfio, ""},
		"not allowed":               {Device{}, vfio, "does not allow passthrough"},
		"its group is not allowed":  {Device{Passthrough: &PassthroughOption{Driver: "vfio-pci", Why: "of its group"}}, vfio, "of its group"},
		"only rebound":              {Device{Passthrough: &PassthroughOption{Driver: "vfio-pci", Only: true}}, nil, "can only be allocated with driver: vfio"},
		"shared":                    {Device{Passthrough: rebindable, Capacity: shared}, vfio, "it is shared"},
		"another driver":            {Device{Passthrough: rebindable}, Parameters{Driver: "uio"}, `is "uio"; want vfio`},
		"its family's parameter":    {Device{Family: "gpu", Passthrough: rebindable}, Parameters{"other": "1"}, ""},
		"that beside it":            {Device{Family: "gpu", Passthrough: rebindable}, Parameters{Driver: DriverVFIO, "other": "1"}, "takes no other under vfio"},
		"not even an empty request": {Device{Passthrough: &PassthroughOption{Only: true}}, Parameters{}, "can only be allocated"},
	} {
		err := accept([]Device{test.d}, test.ask)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
}
