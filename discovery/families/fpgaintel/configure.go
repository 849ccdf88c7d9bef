package fpgaintel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/fpgaintel/program"
	"chandler.dev/discovery/sysfs"
)

// AcceleratorFunction is the ID of the function for an FPGA: 32 lower-case hexadecimal digits
// without dashes.
const AcceleratorFunction discovery.Parameter = "acceleratorFunction"

// programmer programs a port of a card through the card's management engine. Outside of tests it is
// [program.Port].
type programmer func(host fs.FS, engine sysfs.Device, port uint64, b *program.Bitstream) error

// configurePort checks whether the port has the wanted accelerator function. If not, it returns the
// work that programs the port from the administrator's directory of bitstreams. The file is
// <interface ID>/<function ID>.gbs, as in the Intel plugin.
func (p programmer) configurePort(host *discovery.Host, d discovery.Device, want discovery.Parameters) (discovery.Device, discovery.Work, error) {
	wanted := want[AcceleratorFunction]
	now, err := describeAgain(host, d)
	if err != nil {
		return d, nil, fmt.Errorf("read again: %w", err)
	}
	has := now.Attributes.String("afuID")
	if wanted == "" || has == wanted {
		return now, nil, nil
	}
	if has == "" {
		has = "none that can be read"
	}
	refuse := func(why string) (discovery.Device, discovery.Work, error) {
		return d, nil, fmt.Errorf("accelerator function %s is wanted and %s is there: %s", wanted, has, why)
	}
	root := host.Roots[name]
	region := now.Attributes.String("profile")
	switch {
	case root == "":
		return refuse("the administrator has named no directory of bitstreams to program it from")
	case !idDigits().MatchString(wanted):
		return refuse("what has not 32 hexadecimal digits cannot be told to have been programmed")
	case region == "":
		return refuse("the interface ID, for which bitstreams are made, is not known")
	}
	file := path.Join(root, region, wanted+".gbs")
	if !host.FileExists(file) {
		return refuse("there is no bitstream " + file)
	}
	return now, func(ctx context.Context) error { return p.programPort(ctx, host, now, region, wanted, file) }, nil
}

// programPort loads the bitstream into the port.
func (p programmer) programPort(ctx context.Context, host *discovery.Host, d discovery.Device, region, wanted, file string) error {
	b, err := program.Load(host.FS, strings.TrimPrefix(file, "/"))
	if err != nil {
		return err
	}
	if b.Interface != region || b.Function != wanted {
		return fmt.Errorf("bitstream %s is function %.64q for interface %.64q", file, b.Function, b.Interface)
	}
	port := sysfs.At(host.FS, d.Source)
	attrs := port.Attrs()
	number, numbered := attrs.Uint("id")
	function, found := port.PCIFunction()
	if !numbered || !found {
		return errors.Join(errors.New("the port's number or its card cannot be read"), attrs.Err())
	}
	id, engine, err := interfaceID(function)
	if err == nil && id != region {
		err = fmt.Errorf("the card's interface has become %q", id)
	}
	if err == nil {
		err = ctx.Err() // programming cannot be interrupted
	}
	if err != nil {
		return err
	}
	return p(host.FS, engine, number, b)
}

// describeAgain describes the ports of the device's function and returns the port of the device. An
// unreadable port is an error, for example while the port is programmed.
func describeAgain(host *discovery.Host, d discovery.Device) (discovery.Device, error) {
	function, ok := sysfs.At(host.FS, d.Source).PCIFunction()
	if !ok {
		return d, fmt.Errorf("%s is not on a PCI function", d.Source)
	}
	var found []sysfs.Device
	for _, class := range []string{"fpga", "fpga_region"} {
		found = append(found, function.Children(class)...)
	}
	devices, problems := describe(host, found)
	for _, problem := range problems {
		if problem.Device == d.Name {
			return d, problem.Err
		}
	}
	for _, now := range devices {
		if now.Name == d.Name {
			return now, nil
		}
	}
	return d, errors.New("the port is gone")
}
