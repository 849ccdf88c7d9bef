package discovery

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"chandler.dev/discovery/sysfs"
)

// interfaceName is a parameter that a family can accept.
const interfaceName Parameter = "interfaceName"

func TestAcceptors(t *testing.T) {
	accept := JoinAcceptors([]*Family{
		{Name: "nic", Parameters: []Parameter{interfaceName}, Accept: func(given []Device, parameters Parameters) error {
			if len(given) > 1 {
				return errors.New("two of them as " + parameters[interfaceName])
			}
			return nil
		}},
		{Name: "gpu", Variables: []string{"GPU_QUEUES", "GPU_X"}},
	})
	nic, gpu, other := Device{Name: "a", Family: "nic"}, Device{Name: "b", Family: "gpu"}, Device{Name: "b", Family: "unknown"}
	parameters := Parameters{interfaceName: "net1"}
	tuned := Parameters{EnvironmentParameter("GPU_QUEUES"): "2"}
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
		"its variable":       {[]Device{gpu}, tuned, ""},
		"another's variable": {[]Device{gpu, nic}, tuned, "device a of family nic takes no environment[GPU_QUEUES]; name the request"},
		"unlisted variable":  {[]Device{gpu}, Parameters{EnvironmentParameter("LD_PRELOAD"): "x"}, "device b of family gpu takes no environment[LD_PRELOAD]"},
		"parameter as such":  {[]Device{gpu}, Parameters{"GPU_QUEUES": "x"}, "device b of family gpu takes no GPU_QUEUES"},
	} {
		err := accept(test.given, test.parameters)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want %q", name, err, test.want)
		}
	}
}

func TestParametersEnvironment(t *testing.T) {
	parameters := Parameters{EnvironmentParameter("B"): "2=3", interfaceName: "net1", EnvironmentParameter("A"): "one two"}
	if got := parameters.Environment(); !slices.Equal(got, []string{"A=one two", "B=2=3"}) {
		t.Errorf("environment: %q", got)
	}
}

// The environment variables of a family are sorted, valid names outside Chandler's own prefix.
func TestFamilyVariables(t *testing.T) {
	for text, want := range map[string]string{
		"A B_2":      "",
		"A-B":        "want a C identifier",
		"CHANDLER_X": "does not begin with CHANDLER_",
		"B A":        "variable A: is not after B",
		"A A":        "variable A: is not after A",
	} {
		f := Family{
			Name: "widget", Doc: "widgets", Match: []Match{{Class: "widget"}}, Variables: strings.Fields(text),
			Describe: func(*Host, []sysfs.Device) ([]Device, []Problem) { return nil, nil },
		}
		err := Validate([]*Family{&f})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", text, err, want)
		}
	}
}
