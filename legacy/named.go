package legacy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
)

// annotation is the annotation for the names of CDI devices. Container runtimes read any key with
// the prefix "cdi.k8s.io/" (pkg/cdi/annotations.go of tags.cncf.io/container-device-interface).
const annotation = "cdi.k8s.io/chandler.dev_devices"

// errNoNames is the reason why a device that needs CDI cannot be allocated by its name.
var errNoNames = errors.New("the kubelet passes on no names of CDI devices; where the container runtime reads them in annotations, deviceListStrategy CDIAnnotations helps")

// listsOf returns how a container gets the devices: as configured, or otherwise by CDI if the
// devices need it.
func (p *Plugin) listsOf(ctx context.Context, wanted rules.Lists, devices []rules.Offered) (rules.Lists, error) {
	if wanted != (rules.Lists{}) {
		return wanted, nil
	}
	var needs error
	for _, d := range devices {
		needs = errors.Join(needs, needsCDI(d.Edits))
	}
	if needs == nil {
		return rules.Lists{Plain: true}, nil
	}
	if p.config.PassesCDI == nil {
		return rules.Lists{}, errors.Join(needs, errNoNames)
	}
	passes, err := p.config.PassesCDI(ctx)
	if err == nil && !passes {
		err = errNoNames
	}
	if err != nil {
		return rules.Lists{}, errors.Join(needs, err)
	}
	return rules.Lists{CDIDevices: true}, nil
}

// name adds the CDI names of devices to the response. The spec of the devices is on disk before
// name returns.
func (p *Plugin) name(r *pluginapi.ContainerAllocateResponse, lists rules.Lists, devices []rules.Offered) error {
	var names []string
	for _, d := range devices {
		if err := cdi.Check(cdi.Device{Name: d.Name, Edits: d.Edits}); err != nil {
			return err
		}
		names = append(names, cdi.DeviceID(d.Name))
	}
	if err := p.keepSpecs(); err != nil {
		return err
	}
	if lists.CDIDevices {
		for _, name := range names {
			r.CdiDevices = append(r.CdiDevices, &pluginapi.CDIDevice{Name: name})
		}
	}
	if lists.Annotations {
		r.Annotations = map[string]string{annotation: strings.Join(names, ",")}
	}
	return nil
}

// keepSpecs writes the specs of devices. They contain all devices of the host: a container that has
// a device by its name restarts without another Allocate, whichever API offers the device at that
// time. If no device may be allocated by its name, and no container has one, there are no specs.
func (p *Plugin) keepSpecs() error {
	what := p.offered.Load()
	if what == nil {
		return nil
	}
	byName := func(g *allocation.Grant) bool { return g.CDI }
	if !named(what.snapshot) && !slices.ContainsFunc(p.config.Ledger.View(nil).OwnGrants(), byName) {
		return p.config.CDI.KeepDevicesSpecs(nil)
	}
	texts, err := p.specsOf(what.snapshot, p.hostDevices.Load())
	if err == nil {
		err = p.config.CDI.KeepDevicesSpecs(texts)
	}
	if err != nil {
		return fmt.Errorf("devices cannot be given by CDI: %w", err)
	}
	return nil
}

// specsOf contains the texts of the specs by file name, and the devices that they describe.
type specsOf struct {
	snapshot *rules.Snapshot
	known    *[]discovery.Device
	texts    map[string][]byte
}

// specsOf returns the texts of the specs of the offered devices and of all other devices on the
// host. It returns the last result while the devices have not changed.
func (p *Plugin) specsOf(s *rules.Snapshot, known *[]discovery.Device) (map[string][]byte, error) {
	if last := p.specs.Load(); last != nil && last.snapshot == s && last.known == known {
		return last.texts, nil
	}
	var devices []cdi.Device
	add := func(name, family string, edits specs.ContainerEdits) {
		d := cdi.Device{Name: name, Family: family, Edits: edits}
		if cdi.Check(d) == nil { // otherwise Allocate returns the error
			devices = append(devices, d)
		}
	}
	for i := range s.Devices {
		d := &s.Devices[i]
		add(d.Name, d.Family, d.Edits)
	}
	if known != nil {
		for i := range *known {
			d := &(*known)[i]
			if _, offered := s.Lookup(d.Name); !offered {
				add(d.Name, d.Family, d.Edits)
			}
		}
	}
	slices.SortFunc(devices, func(a, b cdi.Device) int { return strings.Compare(a.Name, b.Name) })
	texts, err := p.config.CDI.DevicesSpecs(devices)
	if err == nil {
		p.specs.Store(&specsOf{s, known, texts})
	}
	return texts, err
}

// named reports whether a device may be allocated by its CDI name.
func named(s *rules.Snapshot) bool {
	for i := range s.Devices {
		d := &s.Devices[i]
		for _, offer := range d.Offers {
			lists := s.Allocation[offer.Resource].Lists
			if lists.UsesCDI() || lists == (rules.Lists{}) && needsCDI(d.Edits) != nil {
				return true
			}
		}
	}
	return false
}
