// Command guestrebind runs in guests. It binds a PCI function to vfio and back, as the agent does.
// With -dies, the command ends in place of the given write.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"slices"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/e2e/guesthost"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/passthrough"
)

func main() {
	log.SetFlags(0)
	dies := flag.Int("dies", -1, "before which write")
	flag.Parse()
	if flag.NArg() != 2 {
		log.Fatal("usage: guestrebind [-dies N] take|give ADDRESS")
	}
	if err := run(*dies, flag.Arg(0), flag.Arg(1)); err != nil {
		log.Fatal(err)
	}
}

func run(dies int, do, address string) error {
	guest, err := guesthost.Open(dies)
	if err != nil {
		return err
	}
	anything := func(d discovery.Device) (bool, error) {
		return d.Name == discovery.DeviceName(sysfs.At(guest.FS, address)), nil
	}
	host := &discovery.Host{FS: guest.FS, Passthroughs: []discovery.Selection[string]{{Value: "vfio-pci", Selects: anything}}}
	binder := passthrough.New(passthrough.Config{
		Host: host, Family: "vfio", Journal: journal.Config{Dir: "/run/rebound", Boot: guest.Boot},
		Write: guest.Write, Ledger: guest.Ledger, Stock: guesthost.Stock,
		Busy: func(functions ...sysfs.Device) error {
			return inuse.CheckFree(inuse.HostFinder{Host: host}, inuse.Options{}, false, functions...)
		},
	})
	if err := errors.Join(binder.Open()...); err != nil {
		return err
	}
	if do == "give" {
		var errs []error
		for _, left := range binder.LeftUnits() {
			if slices.Contains(left.Devices, discovery.DeviceName(sysfs.At(guest.FS, address))) {
				errs = append(errs, binder.ReturnUnit(context.Background(), left.Unit))
			}
		}
		return errors.Join(errs...)
	}
	d, found := binder.DescribeDevices(scan.ReadHost(host, families.All)).Lookup(discovery.DeviceName(sysfs.At(guest.FS, address)))
	if !found {
		return errors.New("no such device")
	}
	want := discovery.Parameters{discovery.Driver: discovery.DriverVFIO}
	if err := discovery.JoinAcceptors(families.All)([]discovery.Device{d}, want); err != nil {
		return err
	}
	configure := binder.Configurer(discovery.JoinConfigurers(host, families.All))
	now, work, err := configure(d, want, "claim")
	if err == nil && work != nil {
		if err = work(context.Background()); err == nil {
			now, work, err = configure(d, want, "claim")
		}
	}
	if err == nil && work != nil {
		err = errors.New("there is work again")
	}
	if err != nil {
		return err
	}
	for _, node := range now.Edits.DeviceNodes {
		fmt.Println(node.HostPath)
	}
	return nil
}
