package discovery

import (
	"errors"
	"strings"
	"testing"
)

func TestAcceptors(t *testing.T) {
	accept := Acceptors([]*Family{
		{Name: "nic", Parameters: []Parameter{InterfaceName}, Accept: func(given []Device, parameters Parameters) error {
			if len(given) > 1 {
				return errors.New("two of them as " + parameters[InterfaceName])
			}
			return nil
		}},
		{Name: "gpu"},
	})
	nic, gpu, other := Device{Name: "a", Family: "nic"}, Device{Name: "b", Family: "gpu"}, Device{Name: "b", Family: "unknown"}
	parameters := Parameters{InterfaceName: "net1"}
	for name, test := range map[string]struct {
		given      []Device
		parameters Parameters
		want       string
	}{
		"listed":             {[]Device{nic}, parameters, ""},
		"none":               {[]Device{nic, nic, gpu, other}, nil, ""},
		"not listed":         {[]Device{nic, gpu}, parameters, "device b of family gpu takes no interfaceName"},
		"of no family":       {[]Device{other}, parameters, "device b of family unknown takes no interfaceName"},
		"not together":       {[]Device{nic, nic}, parameters, "two of them as net1"},
		"among its own only": {[]Device{nic, nic, gpu}, parameters, "two of them as net1"},
	} {
		err := accept(test.given, test.parameters)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want %q", name, err, test.want)
		}
	}
}
