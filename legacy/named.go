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
	"chandler.dev/internal/ledger"
)

// annotation is where container runtimes look for names of CDI devices: any key with
// the prefix "cdi.k8s.io/"
// (pkg/cdi/annotations.go of tags.cncf.io/container-device-interface).
const annotation = "cdi.k8s.io/chandler.dev_devices"

// errNoNames says why a device that needs CDI is not given by its name.
var errNoNames = errors.New("the kubelet passes on no names of CDI devices; where the container runtime reads them in annotations, deviceListStrategy CDIAnnotations helps")

// listsOf returns how devices get into a container: as the configuration says, and
// else by CDI if they need it.
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

// name has a container get devices by their CDI names. The spec that says what they
// are is on disk before.
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

// keepSpecs makes the specs of devices what they should be. They have all devices of the
// host: a container that has one by its name starts again without another Allocate,
// whichever API offers the device by then. If no device is given so, and no container
// can have one, there are no specs.
func (p *Plugin) keepSpecs() error {
	what := p.offered.Load()
	if what == nil {
		return nil
	}
	byName := func(g *ledger.Grant) bool { return g.CDI }
	if !named(what.snapshot) && !slices.ContainsFunc(p.config.Ledger.View(nil).Ours(), byName) {
		return p.config.CDI.KeepDevicesSpecs(nil)
	}
	texts, err := p.specsOf(what.snapshot, p.known.Load())
	if err == nil {
		err = p.config.CDI.KeepDevicesSpecs(texts)
	}
	if err != nil {
		return fmt.Errorf("devices cannot be given by CDI: %w", err)
	}
	return nil
}

// specsOf is the texts of the specs of some devices, by the names of files.
type specsOf struct {
	snapshot *rules.Snapshot
	known    *[]discovery.Device
	texts    map[string][]byte
}

// specsOf returns the texts of the specs of what is offered, and of what else there is on the
// host. They are made anew only for others than the last time.
func (p *Plugin) specsOf(s *rules.Snapshot, known *[]discovery.Device) (map[string][]byte, error) {
	if last := p.specs.Load(); last != nil && last.snapshot == s && last.known == known {
		return last.texts, nil
	}
	var devices []cdi.Device
	add := func(name, family string, edits specs.ContainerEdits) {
		d := cdi.Device{Name: name, Family: family, Edits: edits}
		if cdi.Check(d) == nil { // else a container that asks for it is told why
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

// named reports whether a device may be given by its CDI name.
func named(s *rules.Snapshot) bool {
	for i := range s.Devices {
		d := &s.Devices[i]
		for _, offer := range d.Offers {
			lists := s.Allocation[offer.Resource].Lists
			if lists.CDI() || lists == (rules.Lists{}) && needsCDI(d.Edits) != nil {
				return true
			}
		}
	}
	return false
}
