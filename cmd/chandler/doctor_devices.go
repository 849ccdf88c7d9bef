package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/cmd/chandler/informant"
	"chandler.dev/cmd/chandler/settings"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/pciids"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/compile"
	"chandler.dev/internal/doctor"
	"chandler.dev/internal/doctor/gather"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/legacy/list"
)

// healthFile is the agent's file with the states of devices.
const healthFile = "health.json"

// addDevices adds facts from discovery, the configuration and the agent's files.
func (o *doctorOptions) addDevices(ctx context.Context, errOut io.Writer, g gather.Options, f *doctor.Facts) error {
	state := os.DirFS(g.StateDir)
	if g.Source != "" {
		state = noFiles{}
	}
	config, n, err := o.configInForce(state, f)
	if err != nil {
		return err
	}
	host := settings.ConfiguredHost(g.HostFS, config)
	if g.Source == "" {
		informant.AskInformants(ctx, host, families.All, o.hostRoot, errOut)
	}
	if n.Devices, err = (scan.Watch{Host: host, Families: families.All}).ScanOnce(ctx); err != nil {
		return err
	}
	boot, _ := host.ReadText("/proc/sys/kernel/random/boot_id") // without a boot ID, records of every boot apply
	n.Entries, _ = allocation.ReadEntries(state, ".", boot)     // other checks report damaged records
	if f.Kubelet.Pods.Unknown == "" {
		n.addListed(&kubeletapi.Listing{Pods: f.Kubelet.Pods.Value})
	}
	f.Devices.Holders = holders(n)
	f.Devices.MakeNodes, f.Devices.MissingNodes = make(map[string]string), make(map[string][]string)
	for _, family := range families.All {
		if family.MakeNodes != "" {
			f.Devices.MakeNodes[family.Name] = family.MakeNodes
			f.Devices.MissingNodes[family.Name] = slices.DeleteFunc(slices.Clone(family.CommonNodes), host.FileExists)
		}
	}

	settler := scan.Settler{Severity: settings.SeverityOf(config.Health.Severity), IsHeld: func(device string) bool { return len(f.Devices.Holders[device]) > 0 }}
	if data, err := fs.ReadFile(state, healthFile); err == nil {
		_ = json.Unmarshal(data, &settler) // the times of the states; without them, no times are reported
	}
	settled, _ := settler.SettleStates(n.Devices, time.Now())
	f.Devices.Products = pciids.Read(host.FS, n.Devices.Devices)
	f.Devices.Found, f.Devices.Recovered = n.Devices, make(map[string]bool)
	for _, d := range n.Devices.Devices {
		f.Devices.Recovered[d.Name] = d.Health.Status == discovery.Healthy && d.Health.Key() == ""
	}
	snapshot := n.Rules.ApplyTo(settled) //nolint:contextcheck // evaluating an expression does not block
	f.Devices.Snapshot = doctor.KnownAnswer(snapshot)
	f.Kubelet.Ours = allowedIDs(snapshot, n.API)
	f.Devices.Waits = doctor.KnownAnswer(waitingDevices(n)) //nolint:contextcheck // evaluating an expression does not block
	return nil
}

// noFiles is the state directory if there is no agent.
type noFiles struct{}

// Open implements [fs.FS].
func (noFiles) Open(name string) (fs.File, error) {
	return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
}

// configInForce returns the agent's configuration, and notes errors in the latest one.
func (o *doctorOptions) configInForce(state fs.FS, f *doctor.Facts) (*compile.NodeConfig, nodeNow, error) {
	var n nodeNow
	node := o.node
	if node.Labels == nil && f.Cluster.Node.Unknown == "" && f.Cluster.Node.Value != nil {
		node.Labels = maps.Clone(f.Cluster.Node.Value.Labels)
		if v1alpha1.WrongMode(node.Labels) {
			delete(node.Labels, v1alpha1.LabelMode) // an invalid mode has its own code, and is not in force
		}
	}
	if node.Labels == nil {
		if data, err := fs.ReadFile(state, agent.KeptLabels); err == nil {
			_ = json.Unmarshal(data, &node.Labels) // without the labels, entries for labels are unknown
		}
	}
	kept, err := fs.ReadFile(state, agent.KeptConfig)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.Agent.Config = doctor.UnknownAnswer[string](err.Error())
	}
	text := kept
	if o.config != "" {
		if text, err = os.ReadFile(o.config); err != nil {
			return nil, n, fmt.Errorf("read config: %w", err)
		}
	}
	config, wrong := compile.ForNode(text, node)
	switch {
	case wrong != nil && o.config != "" && (f.Source != "" || f.NoKubelet != ""):
		return nil, n, fmt.Errorf("config %s: %w", o.config, wrong) // the agent is not checked, and keeps no valid one
	case wrong != nil:
		f.Agent.Config = doctor.KnownAnswer(wrong.Error())
	case text != nil:
		f.Agent.Config = doctor.KnownAnswer("")
	case f.Agent.Config.Unknown == "":
		f.Agent.Config = doctor.UnknownAnswer[string]("the agent keeps none, and no --config names one")
	}
	if config == nil {
		if config, err = compile.ForNode(kept, node); err != nil {
			if config, err = compile.ForNode(nil, node); err != nil {
				return nil, n, err
			}
		}
	}
	n.Rules = config.Rules
	f.Agent.Mode, f.Agent.ReportOnly, f.Agent.NeedsVisibility = config.Rules.Mode, config.Rules.ReportOnly, usesInUse(config)
	n.API, n.Auto, err = placement.ReadPlacement(state)
	f.Devices.API = doctor.AnswerOf(n.API, err)
	if f.Agent.Mode == discovery.ModeAuto {
		f.Agent.Mode = n.Auto
	}
	if n.Auto == discovery.ModeAuto {
		n.Auto = discovery.ModeDevicePlugin
	}
	return config, n, nil
}

// usesInUse lists the parts of a configuration that require the agent to see which processes have
// devices open. Partitions are not among them: the driver refuses to partition a device in use.
func usesInUse(config *compile.NodeConfig) (parts []string) {
	for part, has := range map[string]bool{
		"reclaim":                   len(config.Reclaim) > 0,
		"passthrough":               len(config.Passthrough) > 0,
		"onDemand.virtualFunctions": len(config.OnDemand.VirtualFunctions) > 0,
	} {
		if has {
			parts = append(parts, part)
		}
	}
	slices.Sort(parts)
	return parts
}

// holders returns the consumers of each device: pods, if the kubelet lists the pods of a claim.
func holders(n nodeNow) map[string][]doctor.Holder {
	found := make(map[string][]doctor.Holder)
	add := func(device string, h doctor.Holder) {
		if device != "" && !slices.Contains(found[device], h) {
			found[device] = append(found[device], h)
		}
	}
	for _, e := range n.Entries {
		owner := e.Owner()
		of := []doctor.Holder{{Owner: owner.String(), API: owner.API}}
		switch {
		case owner.API == discovery.ModeDRA:
			if pods := n.pods[types.NamespacedName{Namespace: owner.Namespace, Name: owner.Name}]; len(pods) > 0 {
				of = nil
				for _, pod := range pods {
					namespace, name, _ := strings.Cut(pod, "/")
					of = append(of, doctor.Holder{Namespace: namespace, Pod: name, Owner: owner.String(), API: owner.API})
				}
			}
		case owner.Name != "":
			of[0].Namespace, of[0].Pod = owner.Namespace, owner.Name
		}
		for _, hold := range e.Holds() {
			for _, h := range of {
				add(hold.Device, h)
			}
		}
	}
	return found
}

// allowedIDs returns the device plugin IDs that the agent may list, by resource. A resource of DRA
// alone has no IDs.
func allowedIDs(snapshot *rules.Snapshot, places map[string]discovery.Mode) map[string][]string {
	found := make(map[string][]string)
	if places == nil {
		return found // without an agent, any plugin may serve a resource
	}
	for resource, units := range list.BuildOffers(snapshot).Units {
		found[resource] = []string{}
		for _, u := range units {
			if slices.ContainsFunc(u.Devices, func(d rules.Offered) bool { return places[d.Silicon()] != discovery.ModeDRA }) {
				found[resource] = append(found[resource], u.IDs...)
			}
		}
	}
	return found
}

// waitingDevices returns the devices that wait to move to the other API, nil before an agent has
// placed the devices.
func waitingDevices(n nodeNow) (found []doctor.Wait) {
	if n.API == nil {
		return nil
	}
	for _, step := range n.PlanSteps(n.Rules) {
		if step.Fate == placement.Waits && step.From != step.To {
			found = append(found, doctor.Wait{Device: step.Device, From: step.From, To: step.To, Reason: step.Reason})
		}
	}
	return found
}
