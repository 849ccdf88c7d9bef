package legacy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/traces"
	"chandler.dev/legacy/list"
)

// allocateIDs answers the requests of containers for IDs of a resource. It looks up the IDs,
// computes the edits and records the grants in the ledger. Either all grants are allocated or none.
func (p *Plugin) allocateIDs(ctx context.Context, l *list.List, resource string, requests [][]string) ([]*pluginapi.ContainerAllocateResponse, error) {
	var responses []*pluginapi.ContainerAllocateResponse
	var grants []*allocation.Grant
	var allUnits []*list.Unit
	now, stock := time.Now(), p.presentStock()
	all := len(slices.Concat(requests...))
	if id, twice := repeatedID(slices.Concat(requests...)); twice {
		return nil, fmt.Errorf("%s: device %q: requested twice in one call", resource, id)
	}
	for _, ids := range requests {
		units, err := l.LookUp(ids)
		if err != nil {
			return nil, unavailableError{err}
		}
		amount, err := l.Amount(ids, units)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", resource, err)
		}
		var variables []string
		if amount != nil {
			share := discovery.Share{Place: amount.Place, Container: amount.IDs, Call: all, Device: len(amount.Unit.IDs)}
			variables = share.Variables(resource)
		}
		grant := discovery.Grant{Resource: resource, All: l.All(units), Consumed: l.ConsumedAmounts(ids)}
		r, err := p.containerResponse(ctx, l.Allocation(), devicesOf(units), grant, variables)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", resource, err)
		}
		responses, allUnits = append(responses, r), append(allUnits, units...)
		for _, id := range ids {
			g := l.Unit(id).Grant(resource, id, stock)
			g.Since, g.CDI = now, len(r.CdiDevices)+len(r.Annotations) > 0
			grants = append(grants, g)
		}
	}
	if err := p.giveGrants(ctx, stock, grants); err != nil {
		return nil, fmt.Errorf("%s: %w", resource, err)
	}
	if err := p.checkConfigured(allUnits); err != nil {
		return nil, unavailableError{errors.Join(fmt.Errorf("%s: %w", resource, err), p.config.Ledger.Grants.EndGrants(grants))}
	}
	signal(p.pollSoon)
	klog.FromContext(ctx).V(2).Info("Devices allocated", "resource", resource, "ids", requests)
	return responses, nil
}

// checkConfigured returns an error if a device of the units is not configured as its resource
// requires. Earlier consumers cannot have such a device, since no device changes while a consumer has
// it.
func (p *Plugin) checkConfigured(units []*list.Unit) error {
	if p.config.CheckConfigured == nil {
		return nil
	}
	for _, d := range devicesOf(units) {
		if err := p.config.CheckConfigured(&d); err != nil {
			return fmt.Errorf("device %s: %w", d.Name, err)
		}
	}
	return nil
}

// passLimit limits the wait of a call for devices that are being reclaimed. If a call fails, the
// kubelet fails the pod. The kubelet itself sets no limit
// (pkg/kubelet/cm/devicemanager/endpoint.go, allocate, in 1.25 to 1.37). But it calls from its main
// loop, and becomes unhealthy after five minutes without an iteration of the loop
// (SyncLoopHealthCheck in pkg/kubelet/kubelet.go, in the same versions).
const passLimit = 10 * time.Second

// passInterval is the longest pause between two tries of a waiting call.
const passInterval = time.Second

// giveGrants records grants. Before, it waits for the end of pods whose IDs the kubelet has
// forgotten, and for reclaimed devices. A forgotten ID may be detected only when the grants are
// recorded. For example, when a pod returns under its name, PodResources lists the new pod before
// the pod has devices. Then giveGrants waits again.
func (p *Plugin) giveGrants(ctx context.Context, stock *list.Stock, grants []*allocation.Grant) error {
	for began := time.Now(); ; {
		_ = traces.Do(ctx, "wait for pods that have ended", func() error { p.awaitEnd(ctx, grants, began.Add(endTimeout)); return nil })
		freed := p.config.Ledger.FreedSignal()
		err := traces.Do(ctx, "write grants and files", func() error { return p.config.Ledger.Grants.AllocateIDs(stock, grants) })
		var blocked *exclusion.Blocked
		if errors.As(err, &blocked) && blocked.Starting != nil && p.joinsGrant(ctx, grants, blocked.Starting) {
			continue
		}
		again := errors.As(err, &blocked) && (blocked.Kind == exclusion.ForgottenByKubelet && time.Since(began) <= endTimeout || blocked.Kind == exclusion.Reclaiming && time.Since(began) < passLimit)
		if !again || ctx.Err() != nil {
			return err
		}
		if blocked.Kind == exclusion.Reclaiming {
			_ = traces.Do(ctx, "wait until the device is free", func() error { waitFor(ctx, freed); return err })
		}
	}
}

// joinsGrant reports whether grants are for the container that was given another function of the
// same IOMMU group just before. If so, it links the grants in the ledger. A virtual machine
// requests a GPU and its audio function as two resources.
func (p *Plugin) joinsGrant(ctx context.Context, grants []*allocation.Grant, first *allocation.Grant) bool {
	resource := grants[0].Resource
	if p.config.AsksForBoth == nil || resource == first.Resource || grants[0].With != nil {
		return false
	}
	both, err := p.config.AsksForBoth(ctx, first.Resource, resource)
	if err != nil {
		klog.FromContext(ctx).Info("It is unknown whether a pod requests two functions of one IOMMU group; the second one is refused", "resource", resource, "other", first.Resource, "reason", err.Error())
	}
	if err != nil || !both {
		return false
	}
	for _, g := range grants {
		g.With = first
	}
	return true
}

// waitFor returns when freed is closed, the context ends, or passInterval is over.
func waitFor(ctx context.Context, freed <-chan struct{}) {
	timer := time.NewTimer(passInterval)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-freed:
	case <-timer.C:
	}
}

// repeatedID returns an ID that occurs twice.
func repeatedID(ids []string) (id string, twice bool) {
	seen := make(map[string]bool, len(ids))
	for _, id := range ids {
		if seen[id] {
			return id, true
		}
		seen[id] = true
	}
	return "", false
}

// devicesOf returns the devices of units, without duplicates, in the order of the units.
func devicesOf(units []*list.Unit) []rules.Offered {
	var devices []rules.Offered
	seen := make(map[string]bool)
	for _, u := range units {
		for _, d := range u.GivenDevices() {
			if !seen[d.Name] {
				seen[d.Name] = true
				devices = append(devices, d)
			}
		}
	}
	return devices
}

// containerResponse returns the kubelet's answer for a container that gets devices.
func (p *Plugin) containerResponse(ctx context.Context, allocation rules.Allocation, devices []rules.Offered, grant discovery.Grant, variables []string) (*pluginapi.ContainerAllocateResponse, error) {
	lists, err := p.listsOf(ctx, allocation.Lists, devices)
	if err != nil {
		return nil, err
	}
	grant.API, grant.Naming = discovery.ModeDevicePlugin, allocation.Naming
	grant.Naming.None = lists.UsesCDI() && !lists.Plain
	edits := specs.ContainerEdits{Env: slices.Clone(allocation.Env)}
	if lists.Plain {
		for _, d := range devices {
			edits = discovery.Join(edits, d.Edits)
		}
	}
	if p.config.Grant != nil {
		// Later environment variables replace earlier ones, so those of the whole set come last.
		edits = discovery.Join(edits, p.config.Grant(rules.PlainDevices(devices), grant))
	}
	edits.Env = append(edits.Env, variables...)
	r, err := newResponse(cdi.RebasePaths(edits, p.config.CDI.RuntimeRoot))
	if err != nil || !lists.UsesCDI() {
		return r, err
	}
	return r, p.name(r, lists, devices)
}

// newResponse converts edits to the device plugin API, which supports fewer kinds of edits than
// CDI.
func newResponse(edits specs.ContainerEdits) (*pluginapi.ContainerAllocateResponse, error) {
	r := &pluginapi.ContainerAllocateResponse{}
	errs := []error{needsCDI(edits)}
	for _, node := range edits.DeviceNodes {
		errs = append(errs, addDevice(r, node))
	}
	for _, mount := range edits.Mounts {
		errs = append(errs, addMount(r, mount))
	}
	for _, variable := range edits.Env {
		name, value, _ := strings.Cut(variable, "=")
		if r.Envs == nil {
			r.Envs = make(map[string]string)
		}
		r.Envs[name] = value
	}
	return r, errors.Join(errs...)
}

// needsCDI returns an error that lists edits without an equivalent in the device plugin API, or
// nil. Hooks are not included: they make a device easier to use, and containers worked without
// hooks before.
func needsCDI(edits specs.ContainerEdits) error {
	var errs []error
	for _, part := range []struct {
		what  string
		there bool
	}{
		{"net devices", len(edits.NetDevices) > 0},
		{"additional GIDs", len(edits.AdditionalGIDs) > 0},
		{"Intel RDT", edits.IntelRdt != nil},
	} {
		if part.there {
			errs = append(errs, fmt.Errorf("needs CDI: %s cannot be given through the device-plugin API", part.what))
		}
	}
	for _, mount := range edits.Mounts {
		if !slices.Contains([]string{"", "none", "bind"}, mount.Type) {
			errs = append(errs, fmt.Errorf("needs CDI: mount %s of type %s cannot be given through the device-plugin API", mount.ContainerPath, mount.Type))
		}
	}
	return errors.Join(errs...)
}

// addDevice adds a device node. If the response has a node with the same path, addDevice adds its
// missing permissions.
func addDevice(r *pluginapi.ContainerAllocateResponse, node *specs.DeviceNode) error {
	added := &pluginapi.DeviceSpec{
		ContainerPath: node.Path,
		HostPath:      cmp.Or(node.HostPath, node.Path),
		Permissions:   cmp.Or(node.Permissions, "rw"), // no container must create nodes
	}
	for _, d := range r.Devices {
		if d.ContainerPath != added.ContainerPath {
			continue
		}
		if d.HostPath != added.HostPath {
			return fmt.Errorf("device node %s: both %s and %s are to be it", d.ContainerPath, d.HostPath, added.HostPath)
		}
		for _, permission := range added.Permissions {
			if !strings.ContainsRune(d.Permissions, permission) {
				d.Permissions += string(permission)
			}
		}
		return nil
	}
	r.Devices = append(r.Devices, added)
	return nil
}

// addMount adds a mount. The kubelet makes recursive bind mounts, and supports only the read-only
// option.
func addMount(r *pluginapi.ContainerAllocateResponse, mount *specs.Mount) error {
	added := &pluginapi.Mount{
		ContainerPath: mount.ContainerPath,
		HostPath:      mount.HostPath,
		ReadOnly:      slices.Contains(mount.Options, "ro"),
	}
	for _, m := range r.Mounts {
		if m.ContainerPath != added.ContainerPath {
			continue
		}
		if m.HostPath != added.HostPath {
			return fmt.Errorf("mount %s: both %s and %s are to be it", m.ContainerPath, m.HostPath, added.HostPath)
		}
		m.ReadOnly = m.ReadOnly && added.ReadOnly
		return nil
	}
	r.Mounts = append(r.Mounts, added)
	return nil
}
