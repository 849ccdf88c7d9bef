// Command guestmake runs in guests. It creates virtual functions on demand and removes them, as the
// agent does. With -dies, the command ends in place of the given write.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/e2e/guesthost"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ondemand"
)

func main() {
	log.SetFlags(0)
	dies := flag.Int("dies", -1, "before which write")
	count := flag.Int("count", 3, "how many virtual functions there may be")
	flag.Parse()
	if flag.NArg() != 2 {
		log.Fatal("usage: guestmake [-dies N] [-count N] could|make|undo ADDRESS")
	}
	if err := run(*dies, *count, flag.Arg(0), flag.Arg(1)); err != nil {
		log.Fatal(err)
	}
}

func run(dies, count int, do, physical string) error {
	guest, err := guesthost.Open(dies)
	if err != nil {
		return err
	}
	unit := discovery.DeviceName(sysfs.At(guest.FS, physical))
	selects := func(d discovery.Device) (bool, error) { return d.Name == unit, nil }
	host := &discovery.Host{FS: guest.FS, VirtualFunctions: []discovery.Selection[int]{{Value: count, Selects: selects}}}
	var maker *ondemand.Manager
	scan := func() *discovery.Snapshot { return maker.DescribeDevices(scan.ReadHost(host, families.All)) }
	maker = ondemand.New(ondemand.Config{
		Host: host, Families: families.All, Journal: journal.Config{Dir: "/run/made", Boot: guest.Boot}, Ledger: guest.Ledger, Stock: guesthost.Stock,
		Tools: discovery.Tools{
			Write: guest.Write,
			CheckBusy: func(keep bool, functions ...sysfs.Device) error {
				return inuse.CheckFree(inuse.HostFinder{Host: host}, inuse.Options{}, keep, functions...)
			},
		},
		Device: func(name string) (discovery.Device, bool) { return scan().Lookup(name) },
	})
	if err := errors.Join(maker.Open()...); err != nil {
		return err
	}
	if do == "undo" {
		_, err := maker.RemoveUnit(context.Background(), unit)
		return err
	}
	var virtual []discovery.Device
	for _, d := range scan().Devices {
		if d.Attributes.String("parent") == unit {
			virtual = append(virtual, d)
			fmt.Println(d.Name, d.Creation == nil)
		}
	}
	if do != "make" {
		return nil
	}
	if len(virtual) == 0 {
		return errors.New("there is none, and none could be made")
	}
	configure := maker.Configurer(discovery.JoinConfigurers(host, families.All))
	_, work, err := configure(virtual[0], nil, "claim")
	if work == nil || err != nil {
		return err
	}
	if err := work(context.Background()); err != nil {
		return err
	}
	for _, before := range virtual {
		now, found := scan().Lookup(before.Name)
		if !found || now.Creation != nil || now.Health.Status != discovery.Healthy {
			return fmt.Errorf("%s is not as it was said it would be: %+v", before.Name, now)
		}
		for name, value := range before.Attributes {
			if is := discovery.Values(now.Attributes[name].ForSlice()); strings.Join(is, " ") != strings.Join(discovery.Values(value.ForSlice()), " ") {
				return fmt.Errorf("%s: %s is %v, and was to be %v", before.Name, name, is, discovery.Values(value.ForSlice()))
			}
		}
	}
	return nil
}
