package agent

import (
	"maps"
	"os"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families/amdgpu"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/ledger/allocation"
)

// A plan computed from the agent's files predicts the agent's actions.
func TestPlanSaysWhatTheAgentDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		before, after := &rules.Rules{Mode: discovery.ModeDRA}, &rules.Rules{Mode: discovery.ModeDevicePlugin}
		config := n.config(before)
		config.FS, config.Families = recordedHost(t, "amdgpu/testdata/mi210x8.host"), []*discovery.Family{amdgpu.Family}
		stop := n.run(config)
		time.Sleep(time.Minute)
		claim, err := n.prepare("pci-0000-23-00-0")
		if err != nil {
			t.Fatal(err)
		}
		steps := func(wanted *rules.Rules) map[string]placement.Fate {
			s := placement.Standing{Rules: before, Devices: scan.ReadHost(&discovery.Host{FS: config.FS}, config.Families)}
			var err error
			if s.API, s.Auto, err = placement.ReadPlacement(os.DirFS(config.StateDir)); err != nil {
				t.Fatal(err)
			}
			if s.Entries, err = allocation.ReadEntries(os.DirFS(config.StateDir), ".", config.BootID); err != nil {
				t.Fatal(err)
			}
			if wanted == nil {
				s.Rules, wanted = after, after
			}
			fates := make(map[string]placement.Fate)
			for _, step := range s.PlanSteps(wanted) {
				fates[step.Device] = step.Fate
				if step.Fate == placement.Waits && (len(step.Owners) != 1 || step.Owners[0].Name != claim.Name) {
					t.Errorf("%s waits for %v", step.Device, step.Owners)
				}
			}
			return fates
		}
		planned := steps(after)
		if planned["pci-0000-23-00-0"] != placement.Waits || planned["pci-0000-24-00-0"] != placement.Moves || len(planned) != 8 {
			t.Errorf("planned %v", planned)
		}
		n.changes <- Change{Settings: Settings{Rules: after}}
		time.Sleep(withdrawalLimit)
		for device, fate := range steps(nil) {
			if planned[device] == placement.Moves && fate != placement.Stays || planned[device] == placement.Waits && fate != placement.Waits {
				t.Errorf("%s %s, and then %s", device, planned[device], fate)
			}
		}
		n.unprepare(claim)
		if err := n.client.ResourceV1().ResourceClaims(claim.Namespace).Delete(t.Context(), claim.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(withdrawalLimit)
		api, _, err := placement.ReadPlacement(os.DirFS(config.StateDir))
		if err != nil {
			t.Fatal(err)
		}
		for silicon := range maps.Keys(api) {
			if api[silicon] != discovery.ModeDevicePlugin {
				t.Errorf("%s is with %s when all is free", silicon, api[silicon])
			}
		}
		stop()
	})
}
