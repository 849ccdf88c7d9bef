package gaudi

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/scan"
)

func TestGrant(t *testing.T) {
	scan := func(host string) []discovery.Device {
		return scan.ReadHost(discoverytest.ReadHost(t, "testdata/"+host), []*discovery.Family{Family}).Devices
	}
	board, slots := scan("gaudi2x8.host"), scan("slots.host")
	for name, test := range map[string]struct {
		given []discovery.Device
		all   bool
		want  []string
	}{
		"all of a resource": {board[1:3], true, []string{
			"HABANA_VISIBLE_DEVICES=2,1",
			"HL_VISIBLE_DEVICES=/dev/accel/accel2,/dev/accel/accel1",
		}},
		"two of a board": {board[1:3], false, []string{
			"HABANA_VISIBLE_DEVICES=2,1",
			"HL_VISIBLE_DEVICES=/dev/accel/accel2,/dev/accel/accel1",
			"HABANA_VISIBLE_MODULES=3,0",
		}},
		"one without a place": {append(board[:1:1], slots[1]), false, []string{
			"HABANA_VISIBLE_DEVICES=0,10",
			"HL_VISIBLE_DEVICES=/dev/accel/accel0,/dev/accel/accel10",
		}},
		"one without nodes": {[]discovery.Device{{Name: "pci-0000-51-00-0"}}, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, grant(test.given, discovery.Grant{All: test.all}).Env); diff != "" {
				t.Errorf("variables (-want +got):\n%s", diff)
			}
		})
	}
}

func FuzzNumber(f *testing.F) {
	for _, name := range []string{"accel0", "accel255", "accel_controlD0", "accel", "accel-1", "accel65536", "accel007"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		n, ok := number(name)
		if !ok {
			return
		}
		if again, ok := number(fmt.Sprintf("accel%d", n)); !ok || again != n {
			t.Errorf("%q is %d, and accel%d is %d (%t)", name, n, n, again, ok)
		}
	})
}
