package fpgaintel

import (
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/fpgaintel/program"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
)

const (
	nlb0      = "d8424dc4a4a3c413f89e433683f9040b"
	nlb3      = "f7df405cbd7acf7222f144b0b93acd18"
	arria     = "69528db6eb31577a8c3668f9faa081f6"
	bitstream = "/srv/intel.com/fpga/" + arria + "/" + nlb3 + ".gbs"
)

// card is a programmable recorded host.
type card struct {
	*discovery.Host
	t          *testing.T
	dir        string
	programmed []string // engine and number of the port
	err        error    // the result of programming
	becomes    string   // the function of the port after programming
}

func newCard(t *testing.T, file string) *card {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	h, err := recorded.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	c := &card{t: t, dir: t.TempDir(), becomes: nlb3}
	if err := h.WriteHost(c.dir); err != nil {
		t.Fatal(err)
	}
	fsys, err := hostfs.Open(c.dir)
	if err != nil {
		t.Fatal(err)
	}
	c.Host = &discovery.Host{FS: fsys, Roots: map[string]string{"fpga-intel": "/srv/intel.com/fpga"}}
	c.write(bitstream, gbs(arria, nlb3))
	return c
}

func (c *card) write(name, text string) {
	c.t.Helper()
	name = filepath.Join(c.dir, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		c.t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		c.t.Fatal(err)
	}
}

// gbs returns a bitstream file.
func gbs(region, function string) string {
	metadata := `{"afu-image": {"interface-uuid": "` + region + `", "accelerator-clusters": [{"accelerator-type-uuid": "` + function + `"}]}}`
	return "XeonFPGA\xb7GBSv001" + string(binary.LittleEndian.AppendUint32(nil, uint32(len(metadata)))) + metadata + "bits"
}

// program simulates the kernel: afterwards the port has the function.
func (c *card) program(_ fs.FS, engine sysfs.Device, port uint64, b *program.Bitstream) error {
	c.programmed = append(c.programmed, engine.Name()+" "+string('0'+rune(port))+" "+b.Function)
	ports, _ := filepath.Glob(filepath.Join(c.dir, "sys/devices/pci*/*/*/fpga*/*/*-port.*/id"))
	for _, file := range ports {
		if id, _ := os.ReadFile(file); strings.TrimSpace(string(id)) == string('0'+rune(port)) {
			c.write(strings.TrimPrefix(filepath.Dir(file), c.dir)+"/afu_id", c.becomes+"\n")
		}
	}
	return c.err
}

// configure calls Configure, does the work and calls Configure again, like the agent.
func (c *card) configure(ctx context.Context, name, want string) (d discovery.Device, worked bool, err error) {
	c.t.Helper()
	family := *Family
	family.Configure = programmer(c.program).configurePort
	d, found := scan.ReadHost(c.Host, []*discovery.Family{&family}).Lookup(name)
	if !found {
		c.t.Fatalf("there is no device %s", name)
	}
	parameters := discovery.Parameters{AcceleratorFunction: want}
	configure := discovery.JoinConfigurers(c.Host, []*discovery.Family{&family})
	d, work, err := configure(d, parameters, "claim")
	if err != nil || work == nil {
		return d, false, err
	}
	if err := work(ctx); err != nil {
		return d, true, err
	}
	d, _, err = configure(d, parameters, "claim")
	return d, true, err
}

func TestConfigure(t *testing.T) {
	for name, want := range map[string]string{
		"pci-0000-17-00-0-port-0": "dfl-fme.0 0 " + nlb3,
		"pci-0000-17-00-1-port-2": "dfl-fme.0 2 " + nlb3, // the engine is on the physical function
	} {
		c := newCard(t, "testdata/ports.host")
		d, worked, err := c.configure(t.Context(), name, nlb3)
		if err != nil || !worked {
			t.Fatalf("%s: worked %v, %v", name, worked, err)
		}
		if len(c.programmed) != 1 || c.programmed[0] != want {
			t.Errorf("%s: programmed %q, want %s", name, c.programmed, want)
		}
		if d.Attributes.String("afuID") != nlb3 || d.Attributes.String("family") != "fpga-intel" || d.Name != name || len(d.Edits.DeviceNodes) != 1 {
			t.Errorf("%s: described anew as %+v", name, d)
		}
		if _, worked, err := c.configure(t.Context(), name, nlb3); worked || err != nil || len(c.programmed) != 1 {
			t.Errorf("%s: a repeat: worked %v, %v", name, worked, err)
		}
	}
}

// The engine's name depends on the driver, here OPAE, and bitstreams are selected by the interface
// of each card.
func TestConfigureOPAE(t *testing.T) {
	c := newCard(t, "testdata/opae.host")
	if _, _, err := c.configure(t.Context(), "pci-0000-04-00-1-port-1", nlb3); err != nil {
		t.Fatal(err)
	}
	if want := "intel-fpga-fme.0 1 " + nlb3; len(c.programmed) != 1 || c.programmed[0] != want {
		t.Errorf("programmed %q, want %s", c.programmed, want)
	}
	if _, _, err := c.configure(t.Context(), "pci-0000-d8-00-0-port-0", nlb3); err == nil || !strings.Contains(err.Error(), "9926ab6d6c925a68aabca7d84c545738") {
		t.Errorf("a card of another interface: %v", err)
	}
}

// Without the administrator's directory, a port that already has the function is still allocated.
func TestConfigureWithoutRoot(t *testing.T) {
	c := newCard(t, "testdata/ports.host")
	c.Roots = nil
	if _, worked, err := c.configure(t.Context(), "pci-0000-17-00-0-port-0", nlb0); worked || err != nil {
		t.Errorf("the function that is there: worked %v, %v", worked, err)
	}
	_, worked, err := c.configure(t.Context(), "pci-0000-17-00-0-port-0", nlb3)
	if worked || err == nil || !strings.Contains(err.Error(), "no directory of bitstreams") {
		t.Errorf("another one: worked %v, %v", worked, err)
	}
}

func TestConfigureRefuses(t *testing.T) {
	const (
		first = "pci-0000-17-00-0-port-0"
		afu   = "/sys/devices/pci0000:16/0000:16:00.0/0000:17:00.0/fpga_region/region0/dfl-port.0/afu_id"
		ids   = "/sys/devices/pci0000:16/0000:16:00.0/0000:17:00.0/fpga_region/region0/dfl-fme.0/dfl-fme-region.1/fpga_region/region1/compat_id"
	)
	for name, test := range map[string]struct {
		change func(c *card)
		wanted string
		want   string
	}{
		"no bitstream":            {func(*card) {}, "00000000000000000000000000000001", "there is no bitstream /srv/intel.com/fpga/" + arria + "/00000000000000000000000000000001.gbs"},
		"an ID of another length": {func(*card) {}, "d8424dc4", "32 hexadecimal digits"},
		"the port is in reset":    {func(c *card) { c.write(afu, "busy") }, nlb3, "attribute afu_id"},
		"the firmware crashed":    {func(c *card) { c.write(afu, crashed) }, nlb3, "the interface ID"},
		"regions disagree":        {func(c *card) { c.write(ids, nlb0) }, nlb3, "the interface ID"},
		"another's bitstream":     {func(c *card) { c.write(bitstream, gbs(nlb0, nlb3)) }, nlb3, "for interface \"" + nlb0},
		"another bitstream":       {func(c *card) { c.write(bitstream, gbs(arria, nlb0)) }, nlb3, "is function \"" + nlb0},
		"a damaged bitstream":     {func(c *card) { c.write(bitstream, "x") }, nlb3, "not in GBS format"},
		"the kernel fails":        {func(c *card) { c.err = errors.New("input/output error") }, nlb3, "input/output error"},
		"it has not become so":    {func(c *card) { c.becomes = nlb0 }, nlb3, "not as it was wanted"},
	} {
		c := newCard(t, "testdata/ports.host")
		test.change(c)
		_, _, err := c.configure(t.Context(), first, test.wanted)
		if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), first) {
			t.Errorf("%s: error %v; want one that names the port and %q", name, err, test.want)
		}
		if c.err == nil && c.becomes == nlb3 && len(c.programmed) > 0 {
			t.Errorf("%s: programmed %q", name, c.programmed)
		}
	}
}

func TestConfigureThatWasCalledOff(t *testing.T) {
	c := newCard(t, "testdata/ports.host")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := c.configure(ctx, "pci-0000-17-00-0-port-0", nlb3); !errors.Is(err, context.Canceled) || len(c.programmed) > 0 {
		t.Errorf("programmed %q, %v", c.programmed, err)
	}
}
