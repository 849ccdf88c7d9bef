package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/utils/ptr"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
)

// TestRequests counts the requests of the agent in the audit log of the API server. The page on
// operations contains the most requests of each situation, and the most bytes of the start.
func TestRequests(t *testing.T) {
	if *version != build.Version {
		t.Skip("the page has the numbers of " + build.Version)
	}
	offers(t)
	page := requestsOnPage(t)
	log := &auditLog{}
	const address, device = "0000:23:00.0", "pci-0000-23-00-0"
	render, err := filepath.Glob(filepath.Join(functionOf(t, address), "drm/renderD*"))
	if err != nil || len(render) != 1 {
		t.Fatalf("render nodes of %s: %q, %v", address, render, err)
	}
	renderNode := filepath.Join(node.NodePath(chandler.HostDir), "dev/dri", filepath.Base(render[0]))
	holder := gpuPod("counted", address)

	for _, s := range []struct {
		name     string
		connects bool // the agent connects to the API server, so each of its requests counts
		happen   func()
	}{
		{"start with 8 GPUs and /dev/kvm", true, func() { startAfresh(t) }},
		{"start", true, func() { startAfresh(t) }},
		{"30 seconds at rest", false, func() { slowLinks(t); time.Sleep(30 * time.Second) }},
		{"a claim", false, func() { apply(t, holder); running(t, "counted"); ready(t, "counted", device, metav1.ConditionTrue) }},
		{"its device fails", false, func() {
			rename(t, renderNode, renderNode+".aside")
			t.Cleanup(func() { _ = os.Rename(renderNode+".aside", renderNode) })
			ready(t, "counted", device, metav1.ConditionFalse)
			tainted(t, device, "chandler.dev/node-missing")
		}},
		{"its device recovers", false, func() {
			rename(t, renderNode+".aside", renderNode)
			ready(t, "counted", device, metav1.ConditionTrue)
		}},
		{"restart", true, func() { killAgent(t); waitForAgent(t) }},
		{"restart of the API server", true, func() { restartAPIServer(t) }},
		{"the end of the claim", false, func() { remove(t, holder); nothingHeld(t) }},
		{"a device is replaced", false, func() { replaceGPU(t, "0000:24:00.0", "pci-0000-24-00-0") }},
		{"a move to the device plugin API", false, func() {
			t.Cleanup(func() { moveTo(t, node.NodeName(), ""); offers(t) })
			moveTo(t, node.NodeName(), "DevicePlugin")
			until(t, "all GPUs to be allocatable", func(ctx context.Context) error { return allocatableIs(ctx, "amd.com/gpu", allGPUs) })
		}},
		{"a move to DRA", false, func() { moveTo(t, node.NodeName(), "DRA"); offers(t) }},
	} {
		switch s.name {
		case "start with 8 GPUs and /dev/kvm":
			usualAgain(t)
			log.settle(t)
			reconfigure(t, besides(t, withoutOthers, ""))
			log.settle(t, "list pods status.nominatedNodeName") // the other devices have left DRA
		case "start":
			reconfigure(t, usual(t))
		}
		log.settle(t)
		s.happen()
		var watches []string
		if s.connects {
			watches = []string{"watch configmaps metadata.name", "watch nodes metadata.name", "watch resourceslices spec.driver, spec.nodeName"}
		}
		requests := log.settle(t, watches...)
		n, counted := 0, ""
		for _, request := range slices.Sorted(maps.Keys(requests)) {
			n += requests[request]
			if !s.connects && isPeriodic(request) {
				n--
			}
			counted += fmt.Sprintf("\n\t%d %s", requests[request], request)
		}
		t.Logf("%s: %d requests%s", s.name, n, counted)
		if most, there := page[s.name]; !there || n > most {
			t.Errorf("%s: %d requests; the page says %d", s.name, n, most)
		}
		if most, there := page[s.name+", KB"]; there {
			kilobytes := (bytesToAPIServer(t) + 999) / 1000
			t.Logf("%s: %d KB", s.name, kilobytes)
			if kilobytes > most {
				t.Errorf("%s: %d KB; the page says %d", s.name, kilobytes, most)
			}
		}
	}
}

// withoutOthers leaves the GPUs and /dev/kvm.
const withoutOthers = `
exclude:
- cel: '!(device.attributes["chandler.dev"].kind in ["gpu", "virtualization"])'
`

// isPeriodic reports whether a request may be due at any time. One of each kind is not counted.
func isPeriodic(request string) bool {
	return slices.Contains([]string{"create resourceslices in a dry run", "list deviceclasses", "list pods spec.nodeName"}, request) || strings.HasPrefix(request, "watch ")
}

var requestsRow = regexp.MustCompile(`(?m)^\| ([^|]+?) \| (\d+)(?:, (\d+) KB)? \|$`)

// requestsOnPage returns the numbers of requests on the page, by situation.
func requestsOnPage(t *testing.T) map[string]int {
	t.Helper()
	data, err := os.ReadFile("../docs/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	page := make(map[string]int)
	_, table, _ := strings.Cut(string(data), "| situation, on a real API server |")
	table, _, _ = strings.Cut(table, "\n\n")
	for _, row := range requestsRow.FindAllStringSubmatch(table, -1) {
		page[row[1]], _ = strconv.Atoi(row[2])
		if row[3] != "" {
			page[row[1]+", KB"], _ = strconv.Atoi(row[3])
		}
	}
	return page
}

// auditLog reads the audit log of the API server.
type auditLog struct {
	read int64
	seen map[types.UID]bool // requests by ID; a watch has an event for its begin and one for its end
}

// settle waits until the agent has sent the given requests, and none for three seconds. It returns
// the requests since the last call, by verb, resource and selector.
func (l *auditLog) settle(t *testing.T, wanted ...string) map[string]int {
	t.Helper()
	const quiet = 3 * time.Second
	requests := make(map[string]int)
	last := time.Now()
	until(t, "the agent to send no requests", func(context.Context) error {
		more, err := l.next()
		if err != nil {
			return err
		}
		for _, request := range more {
			requests[request]++
			last = time.Now()
		}
		missing := slices.ContainsFunc(wanted, func(request string) bool { return requests[request] == 0 })
		if missing || time.Since(last) < quiet {
			return fmt.Errorf("it has sent %v", requests)
		}
		return nil
	})
	return requests
}

// next returns the requests that were appended to the log since the last call.
func (l *auditLog) next() (requests []string, err error) {
	file, err := os.Open(node.NodePath(cluster.AuditLog))
	if err != nil {
		return nil, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.NewSectionReader(file, l.read, 1<<30))
	if err != nil {
		return nil, err
	}
	data = data[:bytes.LastIndexByte(data, '\n')+1]
	l.read += int64(len(data))
	for line := range bytes.Lines(data) {
		var event auditv1.Event
		if err := json.Unmarshal(line, &event); err != nil {
			return nil, err
		}
		if l.seen[event.AuditID] {
			continue
		}
		if l.seen == nil {
			l.seen = make(map[types.UID]bool)
		}
		l.seen[event.AuditID] = true
		request, err := nameOf(&event)
		if err != nil {
			return nil, err
		}
		requests = append(requests, request)
	}
	return requests, nil
}

// nameOf returns verb, resource and field selector of a request. The selector is without its values.
func nameOf(event *auditv1.Event) (string, error) {
	uri, err := url.Parse(event.RequestURI)
	if err != nil {
		return "", err
	}
	name := event.Verb + " " + uri.Path
	if ref := event.ObjectRef; ref != nil {
		name = event.Verb + " " + strings.TrimSuffix(ref.Resource+"/"+ref.Subresource, "/")
	}
	if uri.Query().Has("dryRun") {
		name += " in a dry run"
	}
	for i, term := range strings.Split(uri.Query().Get("fieldSelector"), ",") {
		field, _, _ := strings.Cut(term, "=")
		name += strings.Repeat(",", min(i, 1)) + strings.TrimRight(" "+field, " ")
	}
	return name, nil
}

// bytesToAPIServer returns the bytes that the agent has exchanged with the API server since its
// start, with TLS: those of the TCP connections of its pod to the API server's Service.
func bytesToAPIServer(t *testing.T) (n int) {
	t.Helper()
	ns, err := netns.GetFromPath(filepath.Join(node.NodePath("/proc"), agentPID(t), "ns/net"))
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_INET_DIAG)
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	sockets, err := handle.SocketDiagTCPInfo(unix.AF_INET)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range sockets {
		if s.TCPInfo != nil && s.InetDiagMsg.ID.Destination.Equal(net.ParseIP("10.96.0.1")) {
			n += int(s.TCPInfo.Bytes_received + s.TCPInfo.Bytes_sent)
		}
	}
	if n == 0 {
		t.Fatal("the agent has no connection to the API server")
	}
	return n
}

// startAfresh starts the agent on a node without slices.
func startAfresh(t *testing.T) {
	t.Helper()
	agentOn(t, false)
	err := kube.ResourceV1().ResourceSlices().DeleteCollection(within(t), metav1.DeleteOptions{}, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	agentOn(t, true)
	waitForAgent(t)
}

// agentOn starts the agent of the node, or ends it and waits for its end.
func agentOn(t *testing.T, on bool) {
	t.Helper()
	value := `"off"`
	if on {
		value = "null"
	}
	patch := `{"metadata":{"labels":{"chandler.dev/agent":` + value + `}}}`
	if _, err := kube.CoreV1().Nodes().Patch(within(t), node.NodeName(), types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	if on {
		return
	}
	t.Cleanup(func() { agentOn(t, true); waitForAgent(t) })
	until(t, "the agent's pod to end", func(ctx context.Context) error {
		pods, err := kube.CoreV1().Pods(chandler.Namespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("there are %d pods", len(pods.Items))
		}
		return err
	})
}

func waitForAgent(t *testing.T) {
	t.Helper()
	if err := chandler.WaitForAgent(within(t), kube); err != nil {
		t.Fatal(err)
	}
	offers(t)
}

// restartAPIServer kills and starts the API server.
func restartAPIServer(t *testing.T) {
	t.Helper()
	if err := errors.Join(node.KillAPIServer(), node.StartAPIServer(within(t))); err != nil {
		t.Fatal(err)
	}
}

// slowLinks reduces the speed of all PCIe links until the test ends, as idle devices do.
func slowLinks(t *testing.T) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(node.NodePath(chandler.HostDir), "sys/bus/pci/devices/*/current_link_speed"))
	if err != nil || len(files) < allGPUs {
		t.Fatalf("%d links, %v", len(files), err)
	}
	for _, file := range files {
		before, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.WriteFile(file, before, 0o444) })
		if err := os.WriteFile(file, []byte("2.5 GT/s PCIe\n"), 0o444); err != nil {
			t.Fatal(err)
		}
	}
}

// replaceGPU changes the UUID of a GPU, as if another GPU had replaced it, until the test ends.
func replaceGPU(t *testing.T, address, device string) {
	t.Helper()
	file := filepath.Join(functionOf(t, address), "unique_id")
	rename(t, file, file+".aside")
	t.Cleanup(func() { rename(t, file+".aside", file) })
	if err := os.WriteFile(file, []byte("7777777777777777\n"), 0o444); err != nil {
		t.Fatal(err)
	}
	before := uuidOf(offered(t)[device])
	until(t, "the slices to have the UUID of the new GPU", func(ctx context.Context) error {
		devices, err := chandler.Devices(ctx, kube)
		if err == nil && (uuidOf(devices[device]) == "" || uuidOf(devices[device]) == before) {
			err = fmt.Errorf("device %s is %+v", device, devices[device].Attributes)
		}
		return err
	})
}

func uuidOf(device resourceapi.Device) string {
	return ptr.Deref(device.Attributes["uuid"].StringValue, "")
}
