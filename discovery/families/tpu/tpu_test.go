package tpu_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/tpu"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, tpu.Family) }

func TestGrant(t *testing.T) {
	chip := func(architecture string, numa int64) discovery.Device {
		d := discovery.Device{Attributes: discovery.Attributes{}}
		d.Attributes.SetString("architecture", architecture)
		if numa >= 0 {
			d.Attributes["resource.kubernetes.io/numaNode"] = discovery.Attribute{IntValue: &numa}
		}
		return d
	}
	for name, test := range map[string]struct {
		given []discovery.Device
		want  []string
	}{
		"one chip":                   {[]discovery.Device{chip("v6e", 0)}, []string{"CHIPS_PER_HOST_BOUNDS=1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS=1,1,1"}},
		"three, which is no layout":  {[]discovery.Device{chip("v5e", 0), chip("v5e", 0), chip("v5e", 0)}, nil},
		"one TPU7x":                  {[]discovery.Device{chip("tpu7x", 1)}, []string{"CHIPS_PER_HOST_BOUNDS=1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS=1,1,1"}},
		"TPU7x of two NUMA nodes":    {[]discovery.Device{chip("tpu7x", 1), chip("tpu7x", 0)}, []string{"CHIPS_PER_HOST_BOUNDS=1,2,1", "TPU_CHIPS_PER_HOST_BOUNDS=1,2,1", "WORKLOAD_NIC_PREFERRED_NUMA=0,1"}},
		"TPU7x of the same node":     {[]discovery.Device{chip("tpu7x", 1), chip("tpu7x", 1)}, []string{"CHIPS_PER_HOST_BOUNDS=1,2,1", "TPU_CHIPS_PER_HOST_BOUNDS=1,2,1", "WORKLOAD_NIC_PREFERRED_NUMA=1"}},
		"one's node is not known":    {[]discovery.Device{chip("tpu7x", 1), chip("tpu7x", -1)}, []string{"CHIPS_PER_HOST_BOUNDS=1,2,1", "TPU_CHIPS_PER_HOST_BOUNDS=1,2,1"}},
		"two of an older generation": {[]discovery.Device{chip("v4", 0), chip("v4", 1)}, []string{"CHIPS_PER_HOST_BOUNDS=1,2,1", "TPU_CHIPS_PER_HOST_BOUNDS=1,2,1"}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, tpu.Family.Grant(test.given, discovery.Grant{}).Env); diff != "" {
				t.Error(diff)
			}
		})
	}
}
