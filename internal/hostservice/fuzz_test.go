package hostservice

import (
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"chandler.dev/internal/hostservice/wire"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// No request makes the service panic, or write anything else than an allowed attribute of a
// function or driver, with a value of the attribute's form.
func FuzzRequests(f *testing.F) {
	kernel := passthroughtest.New(f)
	kernel.Add(disk, "nvme", "3")
	kernel.Add(other, "nvme", "4")
	allowed := []string{"bind", "driver_override", "reset_method"}
	function := passthroughtest.Source(disk)
	may := regexp.MustCompile(`^(` + regexp.QuoteMeta(function) + `/(driver_override=[ -.0-~]*|reset_method=[a-z_ ]+)|sys/bus/pci/drivers/(nvme|vfio-pci|e1000e)/bind=` + regexp.QuoteMeta(disk) + `)$`)
	var t *testing.T
	written := 0
	s := NewServer(Config{Host: kernel.Host(), Allowed: allowed, Write: func(name, value string) error {
		if written++; !may.MatchString(name + "=" + value) {
			t.Errorf("wrote %q to %s", value, name)
		}
		return nil
	}})
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
		if written > before && recorder.Code != http.StatusNoContent {
			t.Errorf("wrote, and answered %d %s", recorder.Code, recorder.Body)
		}
		s.session = "s"
	})
}
