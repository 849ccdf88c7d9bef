package qat

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

func TestProvision(t *testing.T) {
	for name, test := range map[string]struct {
		state, services string
		vendor          string
		want            any
		writes          []string
		err             string
	}{
		"as it is":           {"up", "asym;sym", "0x8086", services("sym", "asym"), nil, ""},
		"down":               {"down", "sym;asym", "0x8086", services("sym", "asym"), []string{"state: down -> up"}, ""},
		"others":             {"up", "sym;asym", "0x8086", services("dc"), []string{"state: up -> down", "cfg_services: sym;asym -> dc", "state: down -> up"}, ""},
		"others while down":  {"down", "", "0x8086", services("asym", "new", "sym"), []string{"cfg_services: none -> sym;asym;new", "state: down -> up"}, ""},
		"state not readable": {"", "dc", "0x8086", services("dc"), nil, "qat/state"},
		"state unknown":      {"resetting", "dc", "0x8086", services("dc"), nil, "resetting"},
		"of another vendor":  {"up", "dc", "0x1002", services("dc"), nil, errors.ErrUnsupported.Error()},
		"queues":             {"up", "dc", "0x8086", "queues", nil, errors.ErrUnsupported.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			host := fstest.MapFS{
				"f/vendor":           {Data: []byte(test.vendor)},
				"f/qat/state":        {Data: []byte(test.state)},
				"f/qat/cfg_services": {Data: []byte(test.services)},
			}
			if test.state == "" {
				host["f/qat/state"] = &fstest.MapFile{Mode: fs.ModeDir}
			}
			writes, err := Family.Provision(&discovery.Host{FS: host}, sysfs.At(host, "f"), test.want)
			if (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Fatalf("error %v; want %q", err, test.err)
			}
			var lines []string
			for i, w := range writes {
				lines = append(lines, strings.TrimPrefix(fmt.Sprint(w), "/f/qat/"))
				if w.Always != (i == len(writes)-1) {
					t.Errorf("%v: always is %v", w, w.Always)
				}
			}
			if diff := cmp.Diff(test.writes, lines); diff != "" {
				t.Error(diff)
			}
		})
	}
	empty := fstest.MapFS{"f/vendor": {Data: []byte("0x8086")}}
	if _, err := Family.Provision(&discovery.Host{FS: empty}, sysfs.At(empty, "f"), services("dc")); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("a function without services: %v", err)
	}
}

func services(names ...string) any { return Services(names) }
