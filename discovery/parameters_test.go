package discovery

import (
	"strings"
	"testing"
)

func TestAcceptors(t *testing.T) {
	accept := Acceptors([]*Family{{Name: "nic", Parameters: []Parameter{InterfaceName}}, {Name: "gpu"}})
	parameters := Parameters{InterfaceName: "net1"}
	if err := accept(Device{Name: "a", Family: "nic"}, parameters); err != nil {
		t.Errorf("a parameter that the family lists: %v", err)
	}
	if err := accept(Device{Name: "b", Family: "gpu"}, nil); err != nil {
		t.Errorf("no parameter: %v", err)
	}
	for _, family := range []string{"gpu", "unknown"} {
		err := accept(Device{Name: "b", Family: family}, parameters)
		if err == nil || !strings.Contains(err.Error(), "device b of family "+family+" takes no interfaceName") {
			t.Errorf("family %s: %v", family, err)
		}
	}
}
