package hostservice

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/internal/hostservice/wire"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// ended is a program that has ended.
type ended struct{}

// Read implements [io.Reader].
func (ended) Read([]byte) (int, error) { return 0, io.EOF }

// Write implements [io.Writer].
func (ended) Write(p []byte) (int, error) { return len(p), nil }

// Kill implements [Program].
func (ended) Kill() {}

// Wait implements [Program].
func (ended) Wait() error { return errors.New("it ended") }

// No request makes the service panic, or change anything else than an allowed attribute of a
// function or driver, with a value of the attribute's form, a partition of a function, or a device
// with a parameter of its family.
func FuzzRequests(f *testing.F) {
	kernel := passthroughtest.New(f)
	kernel.Add(disk, "nvme", "3")
	kernel.Add(other, "nvme", "4")
	allowed := []string{"bind", "driver_override", "reset_method"}
	function := passthroughtest.Source(disk)
	may := regexp.MustCompile(`^(` + regexp.QuoteMeta(function) + `/(driver_override=[ -.0-~]*|reset_method=[a-z_ ]+)|sys/bus/pci/drivers/(nvme|vfio-pci|e1000e)/bind=` + regexp.QuoteMeta(disk) + `|` +
		`configure ` + regexp.QuoteMeta(function) + ` image=[ -~]{1,64}|` +
		`--gpu=` + regexp.QuoteMeta(disk) + ` --(create|remove)=[1-8]g\.[0-9]+gb[+.a-z-]{0,18}@[0-9]+( --uuid=MIG-[0-9a-fGPU/-]+)?( --begun)?)$`)
	var t *testing.T
	written, has := 0, ""
	note := func(change string) {
		if written++; !may.MatchString(change) {
			t.Errorf("changed %q", change)
		}
	}
	s := NewServer(Config{
		Host: kernel.Host(), Allowed: allowed,
		Write: func(name, value string) error { note(name + "=" + value); return nil },
		Partitions: map[string]PartitionProgram{"nvml": {Args: facts.ChangeArgs, Run: func(args []string, _ []*os.File) (*wire.Output, error) {
			note(strings.Join(args, " "))
			return &wire.Output{}, nil
		}}},
		Families: []*discovery.Family{{
			Name: "fpga", Parameters: []discovery.Parameter{"image"},
			Configure: func(_ *discovery.Host, d discovery.Device, want discovery.Parameters) (discovery.Device, discovery.Work, error) {
				if has == want["image"] {
					return d, nil, nil
				}
				return d, func(context.Context) error {
					note(fmt.Sprintf("configure %s image=%s", d.Source, want["image"]))
					has = want["image"]
					return nil
				}, nil
			},
		}},
		Programs: map[string]func() (Program, error){"nvml": func() (Program, error) { return ended{}, nil }},
	})
	s.session = "s"
	inode := strconv.FormatUint((&service{Kernel: kernel}).key(disk).Inode, 10)
	add := func(fields string) {
		f.Add("PUT", wire.WritePath, `{"session": "s", "lease": "l", "function": "`+disk+`", "inode": INODE`+fields+`}`)
	}
	add(`, "attribute": "driver_override", "value": "vfio-pci"`)
	add(`, "attribute": "bind", "driver": "vfio-pci"`)
	add(`, "attribute": "reset", "value": "1"`)
	add(`, "attribute": "reset_method", "value": "flr bus"`)
	add(`, "attribute": "bind", "driver": "../.."`)
	f.Add("PUT", wire.PartitionsPath, `{"session": "s", "lease": "l", "function": "`+disk+`", "inode": INODE, "program": "nvml", "place": "1g.10gb+me.all@4", "remove": true, "uuid": "`+instanceUUID+`", "hasBegun": true}`)
	for _, fields := range []string{`"family": "fpga", "device": "port", "parameters": {"image": "0f"}`, `"family": "fpga", "device": "../port", "parameters": {"image": "../0f", "other": ""}`} {
		f.Add("PUT", wire.ConfigurePath, `{"session": "s", "lease": "l", "function": "`+disk+`", "inode": INODE, `+fields+`}`)
	}
	f.Add("POST", wire.ProgramsPath+"/nvml", "\n\n")
	f.Add("GET", wire.ServicePath, "")
	f.Add("PUT", wire.SessionsPath+"/s", "")
	f.Add("POST", wire.FunctionUsersPath, `{"functions": [{"source": "`+function+`", "nodes": [{"path": "/dev/nvme0", "major": 240}]}], "except": ["uid"]}`)
	f.Add("POST", wire.PodUsersPath, `{"device": {"source": "`+function+`"}, "pods": ["uid"], "unlisted": true}`)
	f.Fuzz(func(now *testing.T, method, path, body string) {
		t = now
		request, err := http.NewRequestWithContext(t.Context(), method, "http://host/", strings.NewReader(strings.ReplaceAll(body, "INODE", inode)))
		if err != nil {
			return
		}
		request.URL.Path = path
		before := written
		recorder := httptest.NewRecorder()
		s.Handler().ServeHTTP(recorder, request)
		if written > before && recorder.Code != http.StatusNoContent && recorder.Code != http.StatusOK {
			t.Errorf("wrote, and answered %d %s", recorder.Code, recorder.Body)
		}
		s.session, has = "s", ""
	})
}
