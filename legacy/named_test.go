package legacy

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list/listtest"
)

// grouped is a device that requires an additional group in the container.
func grouped(id string) rules.Offered {
	d := listtest.GPU(id)
	d.Edits.AdditionalGIDs = []uint32{44}
	return d
}

// hooked is a device that is easier to use with a hook.
func hooked(id string) rules.Offered {
	d := listtest.GPU(id)
	d.Edits.Hooks = []*specs.Hook{{HookName: "createContainer", Path: "/bin/hook"}}
	return d
}

// Containers get devices as configured for the resource. A device that needs CDI is allocated by
// CDI if the kubelet supports CDI names, and refused otherwise.
func TestDeviceListStrategies(t *testing.T) {
	yes := func(context.Context) (bool, error) { return true, nil }
	no := func(context.Context) (bool, error) { return false, nil }
	unknown := func(context.Context) (bool, error) { return false, errors.New("no answer") }
	const id, env, none = "chandler.dev/device=gpu-a", "VISIBLE=a", "VISIBLE="
	for name, test := range map[string]struct {
		lists             rules.Lists
		device            rules.Offered
		passes            func(context.Context) (bool, error)
		plain             bool
		names, annotation string
		visible           string
		refused           string
	}{
		"left out":             {device: listtest.GPU("a"), passes: yes, plain: true, visible: env},
		"plain":                {lists: rules.Lists{Plain: true}, device: listtest.GPU("a"), passes: yes, plain: true, visible: env},
		"names":                {lists: rules.Lists{CDIDevices: true}, device: listtest.GPU("a"), passes: no, names: id, visible: none},
		"annotations":          {lists: rules.Lists{Annotations: true}, device: listtest.GPU("a"), passes: no, annotation: id, visible: none},
		"all":                  {lists: rules.Lists{Plain: true, Annotations: true, CDIDevices: true}, device: listtest.GPU("a"), plain: true, names: id, annotation: id, visible: env},
		"only hooks":           {device: hooked("a"), passes: yes, plain: true, visible: env},
		"group":                {device: grouped("a"), passes: yes, names: id, visible: none},
		"group, annotations":   {lists: rules.Lists{Annotations: true}, device: grouped("a"), passes: no, annotation: id, visible: none},
		"group, plain":         {lists: rules.Lists{Plain: true}, device: grouped("a"), passes: yes, refused: "needs CDI: additional GIDs"},
		"group, old kubelet":   {device: grouped("a"), passes: no, refused: "CDIAnnotations"},
		"group, who knows":     {device: grouped("a"), passes: unknown, refused: "no answer"},
		"group, no API server": {device: grouped("a"), refused: "CDIAnnotations"},
	} {
		t.Run(name, func(t *testing.T) {
			k := kubelettest.New(t)
			k.Start()
			config := configFor(k)
			config.CDI, config.PassesCDI = cdi.Dir{Path: t.TempDir()}, test.passes
			config.Grant = func(_ []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
				if grant.Naming.None {
					return specs.ContainerEdits{Env: []string{none}}
				}
				return specs.ContainerEdits{Env: []string{env}}
			}
			p := New(config)
			s := listtest.Snapshot(test.device)
			s.Allocation = map[string]rules.Allocation{listtest.Resource: {Lists: test.lists}}
			publish(p, s)
			run(t, p)
			r, err := k.AwaitPlugin(listtest.Resource, 1).AllocateIDs("a")
			if test.refused != "" {
				if err == nil || !strings.Contains(err.Error(), test.refused) {
					t.Errorf("got %v, want %s", err, test.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, d := range r.CdiDevices {
				names = append(names, d.Name)
			}
			if got := strings.Join(names, " "); got != test.names || r.Annotations["cdi.k8s.io/chandler.dev_devices"] != test.annotation {
				t.Errorf("names %q, annotations %v", got, r.Annotations)
			}
			if plain := len(r.Devices) > 0; plain != test.plain || "VISIBLE="+r.Envs["VISIBLE"] != test.visible {
				t.Errorf("device nodes %v, variables %v", r.Devices, r.Envs)
			}
			if wanted := test.names+test.annotation != ""; there(filepath.Join(config.CDI.Path, "chandler.dev-device.json")) != wanted {
				t.Errorf("there is a spec of devices, or none: want %v", wanted)
			}
		})
	}
}

// After a change of the configuration, the spec remains while containers may have devices by their
// names. If the spec is lost, it is written again.
func TestSpecOfDevicesStaysWithContainers(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	config.CDI = cdi.Dir{Path: t.TempDir()}
	file := filepath.Join(config.CDI.Path, "chandler.dev-device.json")
	p := New(config)
	byName := listtest.Snapshot(listtest.GPU("a"), listtest.GPU("b"))
	byName.Allocation = map[string]rules.Allocation{listtest.Resource: {Lists: rules.Lists{CDIDevices: true}}}
	publish(p, byName)
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	if _, err := registered.AllocateIDs("a"); err != nil {
		t.Fatal(err)
	}
	k.HoldIDs("pod", listtest.Resource, "a")
	kubelettest.EventuallyTrue(t, func() bool { who, _ := holder(p, "gpu-a"); return strings.HasPrefix(who, "default/pod") }, func() string { return "not confirmed" })
	publish(p, listtest.Snapshot(listtest.GPU("b"))) // the other device is now offered by DRA
	p.SetHostDevices(host(byName))
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	kubelettest.EventuallyTrue(t, func() bool {
		data, err := os.ReadFile(file)
		return err == nil && strings.Contains(string(data), `"gpu-a"`)
	}, func() string { return "the spec of what a container has is not written again" })
	k.HoldIDs("pod", listtest.Resource)
	kubelettest.EventuallyTrue(t, func() bool { return !there(file) }, func() string { return "the spec remains, and no consumer has a device by it" })
}
