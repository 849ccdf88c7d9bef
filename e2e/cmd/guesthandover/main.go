// Command guesthandover runs in guests. It does the agent's work when a pod with a PCI function
// ends. The command prints the reason why the function cannot be allocated yet, and then "free".
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/e2e/guesthost"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/reclaim"
)

func main() {
	log.SetFlags(0)
	flag.Parse()
	if flag.NArg() != 3 {
		log.Fatal("usage: guesthandover ADDRESS POD METHOD")
	}
	if err := run(flag.Arg(0), types.UID(flag.Arg(1)), flag.Arg(2)); err != nil {
		log.Fatal(err)
	}
}

func run(address string, pod types.UID, method string) error {
	guest, err := guesthost.Open(-1)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("/run", "handover")
	if err != nil {
		return err
	}
	host := &discovery.Host{FS: guest.FS}
	function, ok := sysfs.At(guest.FS, "sys/bus/pci/devices").LinkTo(address)
	if !ok {
		return errors.New("no such function")
	}
	d, err := pci.DescribeFunction(host, function)
	if err != nil {
		return err
	}
	all := func(discovery.Device) (bool, error) { return true, nil }
	l := ledger.New(ledger.Config{Dir: dir + "/state", Boot: "boot"})
	keeper := reclaim.New(reclaim.Config{
		Host: host, Write: guest.Write, Journal: journal.Config{Dir: dir + "/journal", Boot: "boot"}, Ledger: l, Stock: guesthost.Stock,
		Rules: func() []discovery.Selection[reclaim.Rule] {
			return []discovery.Selection[reclaim.Rule]{{Selects: all, Value: reclaim.Rule{Reset: true, Methods: []string{method}}}}
		},
		Snapshot: func() *discovery.Snapshot { return &discovery.Snapshot{Devices: []discovery.Device{d}} },
		PodOf:    func(allocation.Owner) types.UID { return "" }, Changed: func() {},
	})
	l.SetOutputs(keeper)
	if _, err := l.Open(context.Background()); err != nil {
		return err
	}
	claim := l.NewClaim("claim", "default", "claim")
	claim.Results = []allocation.Result{{Request: "r", Device: d.Name, Silicon: d.Name, Whole: true, Source: d.Name, CDI: d.Name}}
	keeper.NoteUsers(claim.UID, []types.UID{pod})
	if err := l.AllocateClaim(claim, allocation.Allocated, &exclusion.Present{}); err != nil {
		return err
	}
	if err := errors.Join(l.Write(claim.Key()), l.End(claim.UID, nil)); err != nil {
		return err
	}
	go keeper.Run(context.Background())
	for last := ""; ; time.Sleep(10 * time.Millisecond) {
		blocked := l.View(&exclusion.Present{}).BlockedBy(discovery.ModeDRA, "", claim.Holds())
		if blocked == nil {
			fmt.Println("free")
			return nil
		}
		if why := blocked.OwnerText; why != last {
			fmt.Println(why)
			last = why
		}
	}
}
