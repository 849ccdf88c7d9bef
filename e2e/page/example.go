// Package page tests the web UI in a real browser, and makes the picture of it.
package page

import (
	_ "embed"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/deployments"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/web"
)

//go:embed testdata/hgx.host
var hgx []byte

// Now is the time of the example.
var Now = time.Date(2026, 11, 20, 9, 50, 21, 0, time.UTC)

// Recorded returns the facts of a recorded host for an inventory.
func Recorded(name string, host []byte) (inventory.Facts, error) {
	parsed, err := recorded.Parse(host)
	if err != nil {
		return inventory.Facts{}, fmt.Errorf("recorded host %s: %w", name, err)
	}
	shipped, err := deployments.DeviceClasses()
	if err != nil {
		return inventory.Facts{}, err
	}
	classes, err := web.CompileClasses(shipped)
	if err != nil {
		return inventory.Facts{}, err
	}
	found := scan.ReadHost(&discovery.Host{FS: parsed.FS()}, families.All)
	return inventory.Facts{
		Name: name, Version: "0.9.0", Families: len(families.All), Snapshot: (&rules.Rules{}).ApplyTo(found), Classes: classes, At: Now,
	}, nil
}

// Example returns the facts of a server with eight GPUs and made-up pods.
func Example() (inventory.Facts, error) {
	facts, err := Recorded("gpu-node-07", hgx)
	if err != nil {
		return facts, err
	}
	facts.Kubernetes, facts.ConsumersKnown = "1.37.0", true
	ago := func(d time.Duration) time.Time { return Now.Add(-d) }
	claim := func(pod, container, claim, request string, since time.Duration, devices ...string) {
		for _, device := range devices {
			facts.Holders = append(facts.Holders, inventory.Holder{
				Device: device, API: discovery.ModeDRA, Namespace: "ml", Pod: pod, Container: container, Claim: claim, Request: request, Since: ago(since),
			})
		}
	}
	claim("llama-7b-worker-0", "trainer", "llama-7b-worker-0-gpus-x7k2q", "gpus", 3*time.Hour+9*time.Minute, "pci-0000-1a-00-0", "pci-0000-1b-00-0")
	claim("llama-7b-worker-0", "trainer", "llama-7b-worker-0-gpus-x7k2q", "nic", 3*time.Hour+9*time.Minute, "pci-0000-1c-00-0")
	claim("llama-7b-worker-1", "trainer", "llama-7b-worker-1-gpus-9w4tn", "gpus", 3*time.Hour+9*time.Minute, "pci-0000-9e-00-0")
	claim("llama-7b-worker-1", "trainer", "llama-7b-worker-1-gpus-9w4tn", "nic", 3*time.Hour+9*time.Minute, "pci-0000-9f-00-0")
	facts.Holders = append(facts.Holders,
		inventory.Holder{Device: "pci-0000-3e-00-0", API: discovery.ModeDevicePlugin, Namespace: "lab", Pod: "notebook-mara-0", Container: "jupyter", Resource: "nvidia.com/gpu", Since: ago(43 * time.Hour)},
		inventory.Holder{Device: "pci-0000-cd-00-0", API: discovery.ModeDRA, Namespace: "storage", Pod: "nvmeof-gateway-4kq2z", Container: "target", Claim: "nvmeof-gateway-rdma", Request: "nic", Since: ago(420 * time.Hour)},
	)
	for _, name := range []string{"kvm", "tun", "vhost-net"} {
		facts.Holders = append(facts.Holders, inventory.Holder{
			Device: name, API: discovery.ModeDevicePlugin, Namespace: "vm", Pod: "virt-launcher-win11-b8f9z", Container: "compute", Resource: "devices.kubevirt.io/" + name, Since: ago(16 * time.Hour),
		})
	}
	facts.Moves = map[string]inventory.Move{"pci-0000-3e-00-0": {To: discovery.ModeDRA, Reason: "moves to API DRA once it is free of lab/notebook-mara-0 jupyter", Since: ago(105 * time.Minute)}}
	since := map[string]time.Duration{"pci-0000-9e-00-0": 37 * time.Minute, "pci-0000-ce-00-0": 78 * time.Hour}
	for i := range facts.Snapshot.Devices {
		d := &facts.Snapshot.Devices[i]
		// In a real agent, a reading becomes a state after it has lasted for a while.
		if d.Name == "pci-0000-ce-00-0" {
			d.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionLinkDegraded, Reason: "its link has 8 lanes of 16"}
		}
		if ago, sick := since[d.Name]; sick {
			d.Health.Since = metav1.NewTime(Now.Add(-ago))
		}
	}
	return facts, nil
}
