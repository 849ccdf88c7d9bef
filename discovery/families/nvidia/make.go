package nvidia

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/sysfs"
)

// These constants are keys and values of [discovery.Creation.How], which is recorded once an
// instance was created. While an agent creates or removes an instance, a GPU instance without a
// compute instance may belong to the agent's own unfinished work. At other times, such a GPU
// instance belongs to another user.
const (
	stateOf  = "state"
	exists   = "cut"      // the instance exists
	removing = "removing" // the instance may exist, possibly only in part

	uuidOf     = "uuid"        // empty if unknown
	instanceOf = "gpuInstance" // the number of the GPU instance
)

// isIncomplete reports whether an agent began to create or remove an instance and did not finish.
func isIncomplete(how map[string]string) bool { return how[stateOf] != exists }

// makePart returns the work that creates a MIG instance: chandler-host calls NVML. The program runs
// even if the instance seems to exist, and then creates the missing parts. If another user created
// the same instance meanwhile, the instance remains that user's and the agent forgets the unit.
// Instances of the agent that overlap are removed first. Such instances are not allocated, because
// they take the same memory slices.
func makePart(host *discovery.Host, tools discovery.Tools, m discovery.Creation) (discovery.Work, error) {
	place, err := placeOf(host, m)
	if err != nil {
		return nil, err
	}
	how, ours := madeBefore(host, m.Unit)
	change := discovery.PartitionChange{Function: place.gpu.Address, Place: place.name, HasBegun: ours && isIncomplete(how)}
	return func(ctx context.Context) error {
		others := place.inTheWay(host, m.Unit)
		for _, other := range others {
			if err := other.remove(ctx, tools, place.gpu.Address); err != nil {
				return err
			}
		}
		answer, err := runProgram(ctx, tools, change)
		if err != nil {
			return err
		}
		var made facts.CreatedInstance
		if err := json.Unmarshal(bytes.TrimSpace(answer), &made); err != nil {
			return fmt.Errorf("chandler-host's answer: %w", err)
		}
		for _, other := range others {
			if err := tools.RemoveRecord(other.unit); err != nil {
				return err
			}
		}
		switch {
		case made.Refused != "":
			return errors.Join(errors.New(made.Refused), tools.RemoveRecord(m.Unit))
		case made.Found:
			return tools.RemoveRecord(m.Unit)
		}
		return tools.AmendRecord(m.Unit, map[string]string{stateOf: exists, uuidOf: made.UUID, instanceOf: strconv.Itoa(made.GI)})
	}, nil
}

// madeBefore returns the record of a unit that an agent has created, or has begun to create.
func madeBefore(host *discovery.Host, unit string) (how map[string]string, made bool) {
	if host.CreatedUnit == nil {
		return nil, false
	}
	return host.CreatedUnit(unit)
}

// unmakePart returns the work that removes a MIG instance that the agent created. NVML refuses the
// removal while any process runs in the instance. chandler-host runs even if the instance is not
// visible, because a partly created instance is not visible either.
func unmakePart(host *discovery.Host, tools discovery.Tools, m discovery.Creation) (discovery.Work, error) {
	place, err := placeOf(host, m)
	switch {
	case errors.Is(err, errGone):
		return nil, nil
	case tools.ChangePartition == nil:
		return nil, withoutNVML(host, m)
	case err != nil:
		return nil, err
	}
	for _, instance := range place.gpu.Instances {
		here := instance.Placement != nil && *instance.Placement == place.at && instance.Profile+"@" == strings.TrimRight(place.name, "0123456789")
		if here && !sameInstance(m.How, instance) {
			return nil, nil // the agent's instance is gone; another user created a new one in its place
		}
	}
	return func(ctx context.Context) error {
		ours := made{unit: m.Unit, place: place.name, uuid: m.How[uuidOf], begun: isIncomplete(m.How)}
		return ours.remove(ctx, tools, place.gpu.Address)
	}, nil
}

// sameInstance reports whether an instance is the one that the agent created, as far as the UUIDs
// are known.
func sameInstance(how map[string]string, instance facts.Instance) bool {
	return how[uuidOf] == "" || instance.UUID == "" || how[uuidOf] == instance.UUID
}

// made is an instance that an agent created.
type made struct {
	unit  string
	place string
	uuid  string // empty if unknown
	begun bool   // the instance may exist only in part
}

// remove removes the instance unless another instance has taken its place.
func (i *made) remove(ctx context.Context, tools discovery.Tools, gpu string) error {
	if err := tools.AmendRecord(i.unit, map[string]string{stateOf: removing}); err != nil {
		return err
	}
	_, err := runProgram(ctx, tools, discovery.PartitionChange{Function: gpu, Place: i.place, Remove: true, UUID: i.uuid, HasBegun: i.begun})
	return err
}

// withoutNVML returns why an instance cannot be removed on a node where NVML is switched off. It
// returns nil if the kernel no longer lists the instance.
func withoutNVML(host *discovery.Host, m discovery.Creation) error {
	address, gi := m.How["gpu"], m.How[instanceOf]
	text, err := host.ReadText("/proc/driver/nvidia/gpus/" + address + "/information")
	if err != nil {
		return err
	}
	info, err := parseInformation(text)
	if info.minor < 0 {
		return errors.Join(err, fmt.Errorf("number of GPU %s is not known", address))
	}
	there := numberedChildren((&driver{host: host}).capabilities(info), "gi")
	if len(there) == 0 || gi != "" && !slices.ContainsFunc(there, func(e entry) bool { return strconv.Itoa(e.number) == gi }) {
		return nil
	}
	return fmt.Errorf("NVML is not asked on this node any more, and without it the agent cannot remove MIG instance %s of GPU %s that it has made. "+
		"Switch NVML on again, or remove the instance yourself, and the agent will see it: nvidia-smi mig -i %[2]s -dci -gi %[3]s; nvidia-smi mig -i %[2]s -dgi -gi %[3]s",
		m.How["place"], address, cmp.Or(gi, "NUMBER"))
}

func runProgram(ctx context.Context, tools discovery.Tools, change discovery.PartitionChange) ([]byte, error) {
	if tools.ChangePartition == nil {
		return nil, errors.New("there is no chandler-host to ask")
	}
	return tools.ChangePartition(ctx, change)
}

// where is a place on a GPU for a MIG instance.
type where struct {
	gpu  facts.GPU
	name string // in the form that chandler-host takes
	at   facts.Placement
}

// errGone means that no instance exists or can exist at a place: instances go with the driver and
// with MIG mode.
var errGone = errors.New("it cannot have MIG instances any more")

// placeOf returns the place of a [discovery.Creation], according to the current NVML facts.
func placeOf(host *discovery.Host, m discovery.Creation) (where, error) {
	d := &driver{host: host}
	d.readNVML()
	address, name := m.How["gpu"], m.How["place"]
	gpu, known := d.nvml[address]
	switch {
	case sysfs.At(host.FS, m.Of).Driver() != "nvidia":
		return where{}, fmt.Errorf("GPU %s is not there, or has another driver: %w", address, errGone)
	case d.nvmlErr != nil:
		return where{}, d.nvmlErr
	case gpu.Err != nil:
		return where{}, gpu.Err
	case !known:
		return where{}, fmt.Errorf("NVML does not speak of GPU %q", address)
	case gpu.MIG != "enabled":
		return where{}, fmt.Errorf("GPU %s is not in MIG mode: %w", address, errGone)
	}
	for _, profile := range gpu.Profiles {
		for _, at := range profile.Placements {
			if placeName(&profile, at) == name {
				return where{gpu, name, at}, nil
			}
		}
	}
	err := fmt.Errorf("GPU %s has no place %q", address, name)
	if len(gpu.Profiles) > 0 {
		err = fmt.Errorf("%w: %w", err, errGone) // the present driver has no such place, so the driver that created the instance is gone
	}
	return where{}, err
}

// inTheWay returns the agent's instances that overlap with the place of a unit.
func (w *where) inTheWay(host *discovery.Host, unit string) (others []made) {
	silicon, _, _ := strings.Cut(unit, midName)
	p := &parts{d: &driver{host: host}, gpu: discovery.Device{Name: silicon}, told: w.gpu}
	for _, instance := range w.gpu.Instances {
		if instance.Placement == nil || !instance.Placement.Overlaps(w.at) || !p.createdByAgent(instance) {
			continue
		}
		if place := placeName(p.profile(instance), *instance.Placement); place != w.name {
			others = append(others, made{unit: p.nameOf(instance), place: place, uuid: instance.UUID})
		}
	}
	return others
}

// placeName returns the name of a place in the form that chandler-host takes: "1g.10gb@4".
func placeName(profile *facts.Profile, at facts.Placement) string {
	return fmt.Sprintf("%s@%d", profile.Name, at.Start)
}
