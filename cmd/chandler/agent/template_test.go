package agent

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/equality"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/amdgpu"
	"chandler.dev/discovery/families/hypervisor"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver/features"
)

// The template for a future node equals the pool that an agent on the node publishes.
func TestTemplateIsWhatTheAgentPublishes(t *testing.T) {
	for name, test := range map[string]struct {
		host   string
		wanted func(t *testing.T) *rules.Rules
	}{
		"GPUs":                 {"amdgpu/testdata/mi210x8.host", func(*testing.T) *rules.Rules { return &rules.Rules{} }},
		"partitions":           {"amdgpu/testdata/mi300x-cpx.host", func(*testing.T) *rules.Rules { return &rules.Rules{} }},
		"MIG":                  {"nvidia/testdata/h100-mig.host", func(*testing.T) *rules.Rules { return &rules.Rules{} }},
		"devices of two APIs":  {"nvidia/testdata/h100x8.host", func(*testing.T) *rules.Rules { return &rules.Rules{Mode: discovery.ModeDevicePlugin} }},
		"shares, and excluded": {"nvidia/testdata/h100x8.host", func(t *testing.T) *rules.Rules { return sharedAndExcluded(t) }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				config := n.config(test.wanted(t))
				config.FS, config.Families = recordedHost(t, test.host), []*discovery.Family{amdgpu.Family, nvidia.Family, hypervisor.Family}
				template, _ := PoolTemplate("node", scan.ReadHost(&discovery.Host{FS: config.FS}, config.Families), config.Settings, features.All())
				stop := n.run(config)
				time.Sleep(time.Minute)
				synctest.Wait()
				stop()
				if len(n.pools.Pools) == 0 {
					t.Fatal("the agent published nothing")
				}
				if !equality.Semantic.DeepEqual(n.pools, template) {
					t.Errorf("-agent +template:\n%s", cmp.Diff(n.pools, template))
				}
			})
		})
	}
}

func sharedAndExcluded(t *testing.T) *rules.Rules {
	return &rules.Rules{
		Sharing: []rules.Share{{Selector: rulestest.CompileSelector(t, `device.attributes["chandler.dev"].vendor == "nvidia"`), Replicas: 2}},
		Exclude: []rules.Selector{rulestest.CompileSelector(t, `device.attributes["resource.kubernetes.io"].pciBusID == "0000:43:00.0"`)},
	}
}
