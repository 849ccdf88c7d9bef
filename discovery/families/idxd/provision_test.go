package idxd

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// device returns a host with an enabled IAA with two queues and engines. One queue and one engine
// have the configuration of [wanted]. changes override attributes.
func device(changes map[string]string) fstest.MapFS {
	host := fstest.MapFS{"sys/bus/dsa/drivers/idxd/bind": {}, "sys/bus/dsa/drivers/user/bind": {}}
	attributes := map[string]string{
		"state": "enabled", "configurable": "1", "pasid_enabled": "1",
		"max_groups": "2", "max_engines": "2", "max_work_queues": "2", "max_work_queues_size": "64",
		"engine3.0/group_id": "0", "engine3.1/group_id": "-1",
		"wq3.0/state": "enabled", "wq3.0/clients": "0", "wq3.0/type": "user", "wq3.0/mode": "dedicated", "wq3.0/name": "one",
		"wq3.0/size": "16", "wq3.0/priority": "10", "wq3.0/group_id": "0",
		"wq3.1/state": "disabled", "wq3.1/type": "none", "wq3.1/size": "0",
	}
	maps.Copy(attributes, changes)
	for name, value := range attributes {
		if value != "missing" {
			host["f/iax3/"+name] = &fstest.MapFile{Data: []byte(value + "\n")}
		}
	}
	return host
}

func wanted(queues ...Queue) any {
	return Groups{{Engines: 1, Queues: queues}}
}

var (
	one    = Queue{Name: "one", Size: 16, Priority: 10}
	shared = Queue{Name: "all", Shared: true, Size: 48, Priority: 10, Threshold: 48}
)

// The tests of internal/provision cover complete configurations.
func TestProvision(t *testing.T) {
	two := one
	two.Size = 8
	for name, test := range map[string]struct {
		changes map[string]string
		want    any
		writes  []string
		err     string
	}{
		"as it is":      {nil, wanted(one), nil, ""},
		"queue is off":  {map[string]string{"wq3.0/state": "disabled"}, wanted(one), []string{"wq3.0/state: disabled -> enabled"}, ""},
		"device is off": {map[string]string{"wq3.0/state": "disabled", "state": "disabled"}, wanted(one), []string{"state: disabled -> enabled", "wq3.0/state: disabled -> enabled"}, ""},
		"fixed, as it is wanted": {map[string]string{"configurable": "0", "wq3.0/state": "disabled"}, wanted(one),
			[]string{"wq3.0/state: disabled -> enabled"}, ""},
		"entries of one for another": {
			map[string]string{
				"state": "disabled", "wq3.0/state": "disabled", "wq3.0/size": "60",
				"wq3.1/size": "4", "wq3.1/type": "user", "wq3.1/mode": "shared", "wq3.1/name": "all", "wq3.1/group_id": "0", "wq3.1/priority": "10", "wq3.1/threshold": "48",
			},
			wanted(one, shared),
			[]string{
				"wq3.0/size: 60 -> 16", "wq3.1/size: 4 -> 48",
				"state: disabled -> enabled", "wq3.0/state: disabled -> enabled", "wq3.1/state: disabled -> enabled",
			}, ""},
		"name again after the type": {
			map[string]string{"state": "disabled", "wq3.0/state": "disabled", "wq3.0/type": "kernel"}, wanted(one),
			[]string{"wq3.0/type: kernel -> user", "wq3.0/name: none -> one", "state: disabled -> enabled", "wq3.0/state: disabled -> enabled"}, ""},
		"an engine too many": {
			map[string]string{"state": "disabled", "wq3.0/state": "disabled", "engine3.1/group_id": "0"}, wanted(one),
			[]string{"engine3.1/group_id: 0 -> -1", "state: disabled -> enabled", "wq3.0/state: disabled -> enabled"}, ""},

		"in use":               {map[string]string{"wq3.0/clients": "2"}, wanted(two), nil, "wq3.0 is in use: clients: 2"},
		"in use by the kernel": {map[string]string{"wq3.0/type": "kernel"}, wanted(two), nil, "wq3.0 is in use by the kernel"},
		"another is enabled":   {map[string]string{"wq3.1/state": "enabled"}, wanted(two), nil, "wq3.1 is enabled and not in the configuration"},
		"fixed":                {map[string]string{"configurable": "0"}, wanted(two), nil, "fixed by its firmware"},
		"too many engines":     {nil, Groups{{Engines: 3, Queues: []Queue{one}}}, nil, "3 engines are wanted, and it has 2"},
		"too many groups":      {map[string]string{"max_groups": "0"}, wanted(one), nil, "1 groups are wanted"},
		"too many queues":      {nil, wanted(one, one, one), nil, "3 work queues"},
		"too many entries":     {map[string]string{"max_work_queues_size": "15"}, wanted(one), nil, "16 entries"},
		"another's entries":    {map[string]string{"state": "disabled", "wq3.1/size": "60"}, wanted(two), nil, "68 entries"},
		"shared without PASID": {map[string]string{"pasid_enabled": "0"}, wanted(one, shared), nil, "PASID"},
		"bounds missing":       {map[string]string{"max_engines": "missing"}, wanted(one), nil, "max_engines: missing"},
		"bounds garbled":       {map[string]string{"max_engines": "many"}, wanted(one), nil, "max_engines"},
		"clients garbled":      {map[string]string{"wq3.0/clients": "many"}, wanted(two), nil, "clients"},
		"services":             {nil, []string{"dc"}, nil, errors.ErrUnsupported.Error()},
		"size larger than an int": {map[string]string{"wq3.0/size": "18446744073709551615"}, wanted(one), []string{
			"wq3.0/state: enabled -> disabled", "state: enabled -> disabled", "engine3.0/group_id: none -> 0", "wq3.0/size: none -> 16",
			"wq3.0/group_id: none -> 0", "wq3.0/mode: none -> dedicated", "wq3.0/priority: none -> 10", "wq3.0/type: none -> user", "wq3.0/name: none -> one",
			"state: disabled -> enabled", "wq3.0/state: disabled -> enabled",
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			host := device(test.changes)
			writes, err := Family.Provision(&discovery.Host{FS: host}, sysfs.At(host, "f"), test.want)
			if (err == nil) != (test.err == "") || err != nil && (!strings.Contains(err.Error(), test.err) || len(writes) > 0) {
				t.Fatalf("error %v; want %q", err, test.err)
			}
			var lines []string
			for _, w := range writes {
				lines = append(lines, strings.TrimPrefix(fmt.Sprint(w), "/f/iax3/"))
			}
			if diff := cmp.Diff(test.writes, lines); diff != "" {
				t.Error(diff)
			}
		})
	}
	old := device(map[string]string{"wq3.0/state": "disabled"})
	delete(old, "sys/bus/dsa/drivers/user/bind")
	if writes, err := Family.Provision(&discovery.Host{FS: old}, sysfs.At(old, "f"), wanted(one)); err == nil || len(writes) > 0 {
		t.Errorf("without the driver of queues: %v, %v", writes, err)
	}
}
