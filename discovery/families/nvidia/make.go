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

// Words of [discovery.Making.How] that are written down once an instance was cut. While it is being cut
// or removed, a GPU instance without a compute instance may be left of it; at other times, it is
// somebody else's.
const (
	stateOf  = "state"
	cut      = "cut"      // it is there
	removing = "removing" // it may be there, or half of it

	uuidOf     = "uuid"        // "" if not known
	instanceOf = "gpuInstance" // the number
)

// begun reports whether an agent has begun to make or remove an instance, and not ended that.
func begun(how map[string]string) bool { return how[stateOf] != cut }

// makePart returns the work that cuts a MIG instance: chandler-nvml asks NVML for it. It is
// asked even if the instance seems to be there, and then makes what is missing. If somebody
// else has made it meanwhile, it is his. Instances that an agent has made are removed first
// where they are in the way. Nobody has them, since they take the same slices of memory.
func makePart(host *discovery.Host, tools discovery.Tools, m discovery.Making) (discovery.Work, error) {
	place, err := placeOf(host, m)
	if err != nil {
		return nil, err
	}
	args := []string{"--gpu=" + place.gpu.Address, "--cut=" + place.name}
	if how, ours := madeBefore(host, m.Unit); ours && begun(how) {
		args = append(args, "--begun")
	}
	return func(ctx context.Context) error {
		others := place.inTheWay(host, m.Unit)
		for _, other := range others {
			if err := other.remove(ctx, tools, place.gpu.Address); err != nil {
				return err
			}
		}
		answer, err := run(ctx, tools, args...)
		if err != nil {
			return err
		}
		var made facts.Cut
		if err := json.Unmarshal(bytes.TrimSpace(answer), &made); err != nil {
			return fmt.Errorf("chandler-nvml's answer: %w", err)
		}
		for _, other := range others {
			if err := tools.Forget(other.unit); err != nil {
				return err
			}
		}
		switch {
		case made.Refused != "":
			return errors.Join(errors.New(made.Refused), tools.Forget(m.Unit))
		case made.Found:
			return tools.Forget(m.Unit)
		}
		return tools.Note(m.Unit, map[string]string{stateOf: cut, uuidOf: made.UUID, instanceOf: strconv.Itoa(made.GI)})
	}, nil
}

// madeBefore returns what is written down of a unit that an agent has made, or has begun to make.
func madeBefore(host *discovery.Host, unit string) (how map[string]string, made bool) {
	if host.Made == nil {
		return nil, false
	}
	return host.Made(unit)
}

// unmakePart returns the work that removes a MIG instance that was cut. NVML refuses it
// while anything runs in the instance, whoever started that. It is asked even if the
// instance is not seen, since what was left half made is not.
func unmakePart(host *discovery.Host, tools discovery.Tools, m discovery.Making) (discovery.Work, error) {
	place, err := placeOf(host, m)
	switch {
	case errors.Is(err, errGone):
		return nil, nil
	case tools.Run == nil:
		return nil, withoutNVML(host, m)
	case err != nil:
		return nil, err
	}
	for _, instance := range place.gpu.Instances {
		here := instance.Placement != nil && *instance.Placement == place.at && instance.Profile+"@" == strings.TrimRight(place.name, "0123456789")
		if here && !same(m.How, instance) {
			return nil, nil // ours has gone, and somebody has made another one in its place
		}
	}
	return func(ctx context.Context) error {
		ours := made{unit: m.Unit, place: place.name, uuid: m.How[uuidOf], begun: begun(m.How)}
		return ours.remove(ctx, tools, place.gpu.Address)
	}, nil
}

// gpuOf returns which GPU arguments of chandler-nvml change.
func gpuOf(args []string) string {
	for _, arg := range args {
		if gpu, ok := strings.CutPrefix(arg, "--gpu="); ok {
			return gpu
		}
	}
	return ""
}

// same reports whether an instance is the one that was cut, as far as that can be told.
func same(how map[string]string, instance facts.Instance) bool {
	return how[uuidOf] == "" || instance.UUID == "" || how[uuidOf] == instance.UUID
}

// made is an instance that an agent has made.
type made struct {
	unit  string
	place string
	uuid  string // "" if not known
	begun bool   // there may be only half of it
}

// remove removes the instance, unless it is another one by now.
func (i *made) remove(ctx context.Context, tools discovery.Tools, gpu string) error {
	if err := tools.Note(i.unit, map[string]string{stateOf: removing}); err != nil {
		return err
	}
	args := []string{"--gpu=" + gpu, "--remove=" + i.place}
	if i.uuid != "" {
		args = append(args, "--uuid="+i.uuid)
	}
	if i.begun {
		args = append(args, "--begun")
	}
	_, err := run(ctx, tools, args...)
	return err
}

// withoutNVML returns why an instance is not removed on a node on which NVML is not asked any more,
// nil if it is not there. The kernel tells that.
func withoutNVML(host *discovery.Host, m discovery.Making) error {
	address, gi := m.How["gpu"], m.How[instanceOf]
	text, err := host.ReadText("/proc/driver/nvidia/gpus/" + address + "/information")
	if err != nil {
		return err
	}
	info, err := parseInformation(text)
	if info.minor < 0 {
		return errors.Join(err, fmt.Errorf("number of GPU %s is not known", address))
	}
	there := numbered((&driver{host: host}).capabilities(info), "gi")
	if len(there) == 0 || gi != "" && !slices.ContainsFunc(there, func(e entry) bool { return strconv.Itoa(e.number) == gi }) {
		return nil
	}
	return fmt.Errorf("NVML is not asked on this node any more, and without it the agent cannot remove MIG instance %s of GPU %s that it has made. "+
		"Switch NVML on again, or remove the instance yourself, and the agent will see it: nvidia-smi mig -i %[2]s -dci -gi %[3]s; nvidia-smi mig -i %[2]s -dgi -gi %[3]s",
		m.How["place"], address, cmp.Or(gi, "NUMBER"))
}

func run(ctx context.Context, tools discovery.Tools, args ...string) ([]byte, error) {
	if tools.Run == nil {
		return nil, errors.New("there is no chandler-nvml to ask")
	}
	return tools.Run(ctx, args...)
}

// where is a place on a GPU.
type where struct {
	gpu  facts.GPU
	name string // as chandler-nvml takes it
	at   facts.Placement
}

// errGone says that there is nothing at a place, and cannot be: instances go with the driver
// and with MIG mode.
var errGone = errors.New("it cannot have MIG instances any more")

// placeOf returns the place at which something is made. It goes by what NVML says now.
func placeOf(host *discovery.Host, m discovery.Making) (where, error) {
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
		err = fmt.Errorf("%w: %w", err, errGone) // with this driver; the one that made it is gone
	}
	return where{}, err
}

// inTheWay returns the instances that an agent has made and that are in the way of a unit.
func (w *where) inTheWay(host *discovery.Host, unit string) (others []made) {
	silicon, _, _ := strings.Cut(unit, midName)
	p := &parts{d: &driver{host: host}, gpu: discovery.Device{Name: silicon}, told: w.gpu}
	for _, instance := range w.gpu.Instances {
		if instance.Placement == nil || !instance.Placement.Overlaps(w.at) || !p.made(instance) {
			continue
		}
		if place := placeName(p.profile(instance), *instance.Placement); place != w.name {
			others = append(others, made{unit: p.nameOf(instance), place: place, uuid: instance.UUID})
		}
	}
	return others
}

// placeName returns the name of a place as chandler-nvml takes it: "1g.10gb@4".
func placeName(profile *facts.Profile, at facts.Placement) string {
	return fmt.Sprintf("%s@%d", profile.Name, at.Start)
}
