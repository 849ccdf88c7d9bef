package hostservice

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/fpgaintel"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/recorded"
	"chandler.dev/internal/hostservice/wire"
)

// image is a parameter that requires work.
const image discovery.Parameter = "image"

// configurable is a service for a family whose devices have an image.
type configurable struct {
	*service

	image   string
	changes []string
	err     error
	hold    chan struct{} // delays the work until it is closed
	begun   chan struct{} // closed by the work
}

func newConfigurable(t *testing.T) *configurable {
	c := &configurable{service: newService(t)}
	c.config.Families = []*discovery.Family{{Name: "fpga", Parameters: []discovery.Parameter{image}, Configure: c.configureDevice}}
	return c
}

func (c *configurable) configureDevice(_ *discovery.Host, d discovery.Device, want discovery.Parameters) (discovery.Device, discovery.Work, error) {
	switch {
	case d.Name != "port":
		return d, nil, errors.New("the port is gone")
	case want[image] == c.image:
		return d, nil, nil
	}
	return d, func(ctx context.Context) error {
		if c.hold != nil {
			close(c.begun)
			<-c.hold
		}
		if err := errors.Join(ctx.Err(), c.err); err != nil {
			return err
		}
		c.image = want[image]
		c.changes = append(c.changes, fmt.Sprintf("%s below %s: %s", d.Name, d.Source, c.image))
		return nil
	}, nil
}

func (c *configurable) device() *discovery.Device {
	return &discovery.Device{Name: "port", Family: "fpga"}
}

// The family's code in the service configures the device, which it finds below the function. A
// repeated request changes nothing, and the error of a failed change arrives.
func TestConfigure(t *testing.T) {
	c := newConfigurable(t)
	client := c.client()
	for range 2 {
		if err := client.Configure(t.Context(), "port configured", c.key(disk), c.device(), discovery.Parameters{image: "0f"}); err != nil {
			t.Fatal(err)
		}
	}
	function, _ := findFunction(c.Host(), "test", disk, c.key(disk).Inode)
	if diff := cmp.Diff([]string{"port below " + function.Path + ": 0f"}, c.changes); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	if want := "configured device port of function " + disk + ` with map[image:0f], lease "port configured": <nil>`; !strings.Contains(c.log.String(), want) {
		t.Errorf("log %s", c.log.String())
	}
	c.err = errors.New("the FPGA's error bits are 0x6")
	if err := client.Configure(t.Context(), "test", c.key(disk), c.device(), discovery.Parameters{image: "1f"}); err == nil || !strings.Contains(err.Error(), c.err.Error()) {
		t.Errorf("error %v", err)
	}
	if err := NewClient("/nowhere", nil).Configure(t.Context(), "test", c.key(disk), c.device(), nil); !errors.Is(err, ErrAway) || !errors.Is(err, discovery.ErrTransient) {
		t.Errorf("without a service: %v", err)
	}
}

// The service checks each configuration itself. A refused one changes nothing, and is logged.
func TestConfigureRefusals(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*wire.Configuration)
		want   string
	}{
		"family":            {func(c *wire.Configuration) { c.Family = "nvidia" }, `family "nvidia" are not`},
		"device":            {func(c *wire.Configuration) { c.Device = "../port" }, "the port is gone"},
		"device of 2 lines": {func(c *wire.Configuration) { c.Device = "port\nwrote nothing" }, "is not the name of a device"},
		"parameter":         {func(c *wire.Configuration) { c.Parameters["driver"] = "vfio" }, `parameter "driver"`},
		"no value":          {func(c *wire.Configuration) { c.Parameters["image"] = "" }, "is not a value"},
		"two lines":         {func(c *wire.Configuration) { c.Parameters["image"] = "0f\n" }, "is not a value"},
		"value too long":    {func(c *wire.Configuration) { c.Parameters["image"] = strings.Repeat("0", 65) }, "is not a value"},
		"no lease":          {func(c *wire.Configuration) { c.Lease = "" }, "names no lease"},
		"path as function":  {func(c *wire.Configuration) { c.Function = "../" + disk }, "is not the address"},
		"removed function":  {func(c *wire.Configuration) { c.Function = "0000:05:00.0" }, "is missing"},
		"another function":  {func(c *wire.Configuration) { c.Function = other }, "is not the one of the lease"},
		"another session":   {func(c *wire.Configuration) { c.Session = "t" }, "another agent"},
		"no session at all": {func(c *wire.Configuration) { c.Session = "" }, "another agent"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newConfigurable(t)
			if err := c.beginSession(t.Context(), "s"); err != nil {
				t.Fatal(err)
			}
			request := wire.Configuration{Session: "s", Lease: "test", Function: disk, Inode: c.key(disk).Inode, Family: "fpga", Device: "port", Parameters: map[string]string{"image": "0f"}}
			test.change(&request)
			err := c.client().call(t.Context(), http.MethodPut, wire.ConfigurePath, request, nil)
			if err == nil || !strings.Contains(err.Error(), test.want) || len(c.changes) > 0 {
				t.Errorf("error %v, want %q; changes %q", err, test.want, c.changes)
			}
			if a := (*answer)(nil); !errors.As(err, &a) || !strings.Contains(c.log.String(), "refused: "+a.text) {
				t.Errorf("error %v is not in the log %q", err, c.log.String())
			}
		})
	}
}

// A change continues when its agent is gone, and the next agent's session begins after it. A context
// that has ended sends no request.
func TestConfigureOfEarlierAgent(t *testing.T) {
	c := newConfigurable(t)
	c.hold, c.begun = make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	earlier, next := c.client(), c.client()
	changed, begun := make(chan error, 1), make(chan error, 1)
	go func() {
		changed <- earlier.Configure(ctx, "test", c.key(disk), c.device(), discovery.Parameters{image: "0f"})
	}()
	<-c.begun
	cancel()
	if err := next.BeginSession(ctx); err == nil || !strings.Contains(err.Error(), "a write of the configuration of function "+disk) {
		t.Errorf("during the change: %v", err)
	}
	go func() { begun <- next.BeginSession(t.Context()) }()
	close(c.hold)
	if err := errors.Join(<-changed, <-begun); err != nil || c.image != "0f" {
		t.Errorf("image %q, %v", c.image, err)
	}
	if err := next.Configure(ctx, "test", c.key(disk), c.device(), discovery.Parameters{image: "1f"}); !errors.Is(err, context.Canceled) || c.image != "0f" {
		t.Errorf("image %q, %v", c.image, err)
	}
}

// The IDs of the card and the function in a recording of the family.
const (
	fpgaRegion   = "69528db6eb31577a8c3668f9faa081f6"
	fpgaFunction = "f7df405cbd7acf7222f144b0b93acd18"
)

// The service programs an FPGA through the socket: the request reaches the kernel's management
// engine, which is /dev/null here and does not support the request. Only bitstreams of the
// administrator's directory are loaded, and only regular files.
func TestConfigureFPGA(t *testing.T) {
	data, err := os.ReadFile("../../discovery/families/fpgaintel/testdata/ports.host")
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	recording, err := recorded.Parse([]byte(strings.ReplaceAll(string(data), "243:0", "1:3")))
	if err != nil {
		t.Fatal(err)
	}
	if standIns, err := recording.LayoutNodes(root); err != nil || len(standIns) > 0 {
		t.Skipf("device nodes cannot be created here: %q, %v", standIns, err)
	}
	fsys, err := hostfs.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	host := &discovery.Host{FS: fsys, Roots: map[string]string{"fpga-intel": "/srv/fpga"}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- Run(ctx, socketDir(root), NewServer(Config{Host: host, Families: []*discovery.Family{fpgaintel.Family}}))
	}()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	client := NewClient(socketDir(root), nil)
	eventually(t, "the service", func() error { return client.BeginSession(t.Context()) })

	program := func(function, want string) {
		t.Helper()
		key := discovery.FunctionKey(host, "sys/bus/pci/devices/0000:17:00.0")
		d := &discovery.Device{Name: "pci-0000-17-00-0-port-0", Family: "fpga-intel"}
		err := client.Configure(t.Context(), d.Name+" configured", key, d, discovery.Parameters{fpgaintel.AcceleratorFunction: function})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("function %q: %v, want %q", function, err, want)
		}
	}
	file := filepath.Join(root, "srv/fpga", fpgaRegion, fpgaFunction+".gbs")
	if err := os.MkdirAll(file, 0o755); err != nil {
		t.Fatal(err)
	}
	program(fpgaFunction, "not a regular file")
	metadata := `{"afu-image": {"interface-uuid": "` + fpgaRegion + `", "accelerator-clusters": [{"accelerator-type-uuid": "` + fpgaFunction + `"}]}}`
	bitstream := "XeonFPGA\xb7GBSv001" + string(binary.LittleEndian.AppendUint32(nil, uint32(len(metadata)))) + metadata + "bits"
	if err := errors.Join(os.Remove(file), os.WriteFile(file, []byte(bitstream), 0o600)); err != nil {
		t.Fatal(err)
	}
	program(fpgaFunction, "program port 0: inappropriate ioctl for device")
	program("../../../etc/"+fpgaFunction, "has not 32 hexadecimal digits")
	program(strings.Repeat("0", 32), "there is no bitstream /srv/fpga/"+fpgaRegion)
}
