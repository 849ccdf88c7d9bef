package main

import (
	"bytes"
	"context"
	"fmt"
	"html"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/kubernetes/fake"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/settings"
	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/inventory/text"
	"chandler.dev/internal/terminal"
	"chandler.dev/internal/web"
)

// recordedHosts returns the recorded hosts of all families.
func recordedHosts(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("../../discovery/families/*/testdata/*.host")
	if err != nil || len(files) < 100 {
		t.Fatalf("%d recorded hosts, %v", len(files), err)
	}
	return files
}

// recordedInventory returns the inventory of a recorded host. If asked is true, the devices are
// known to have no consumers.
func recordedInventory(t *testing.T, file string, asked bool) *inventory.Inventory {
	t.Helper()
	facts := recordedFacts(t, file)
	facts.ConsumersKnown = asked
	return inventory.Make(facts)
}

func recordedFacts(t *testing.T, file string) inventory.Facts {
	t.Helper()
	config, err := settings.LoadHere("", v1alpha1.Node{}, settings.Host{})
	if err != nil {
		t.Fatal(err)
	}
	host, err := readRecorded(file)
	if err != nil {
		t.Fatal(err)
	}
	found := scan.ReadHost(settings.ConfiguredHost(host.FS(), config), families.All)
	classes, err := shippedClasses()
	if err != nil {
		t.Fatal(err)
	}
	return inventory.Facts{
		Name: strings.TrimSuffix(filepath.Base(file), ".host"), Recorded: filepath.Base(file), Families: len(families.All), Snapshot: config.Rules.ApplyTo(found), Classes: classes, At: time.Now(),
	}
}

var (
	rowNumbers = regexp.MustCompile(`<td class="num free">(\d+)</td><td class="num">(\d+)</td>(?:<td class="num out">(\d+)</td>)?<td class="num">(\d+)</td>`)
	templates  = regexp.MustCompile(`(?s)<pre class="copy"><span>(apiVersion: .*?)</span></pre>`)
)

// TestPageOfEachHost renders the web UI for every recorded host. Each device has a link and a panel
// or a row of one, numbers add up, and kubectl chandler validate accepts each claim template.
func TestPageOfEachHost(t *testing.T) {
	out := os.Getenv("PAGES") // a directory for viewing the pages
	validated := make(map[string]bool)
	for i, file := range recordedHosts(t) {
		if discoverytest.IsBrief() && i%4 != 0 {
			continue
		}
		inv := recordedInventory(t, file, true)
		var b bytes.Buffer
		if err := web.RenderPage(&b, inv, web.Live{}); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		text := b.String()
		if out != "" {
			name := filepath.Base(filepath.Dir(filepath.Dir(file))) + "-" + strings.TrimSuffix(filepath.Base(file), ".host") + ".html"
			if err := os.WriteFile(filepath.Join(out, name), b.Bytes(), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for _, d := range inv.Devices {
			if !strings.Contains(text, fmt.Sprintf("id=%q", d.Name)) || !strings.Contains(text, fmt.Sprintf("href=\"#%s\"", d.Name)) {
				t.Errorf("%s: device %s has no panel or no link to it", file, d.Name)
			}
		}
		for _, row := range rowNumbers.FindAllStringSubmatch(text, -1) {
			var free, held, out, all int
			fmt.Sscan(strings.Join(row[1:3], " "), &free, &held) //nolint:errcheck // digits
			fmt.Sscan(row[3], &out)                              //nolint:errcheck // digits or nothing
			fmt.Sscan(row[4], &all)                              //nolint:errcheck // digits
			if free+held+out != all {
				t.Errorf("%s: %v do not add up", file, row[1:])
			}
		}
		for _, match := range templates.FindAllStringSubmatch(text, -1) {
			if document := html.UnescapeString(match[1]); !validated[document] {
				validated[document] = true
				if out, err := stdinTo(document, "validate", "-"); err != nil || strings.Count(out, "\n") != 1 { // else there are findings
					t.Errorf("%s: claim template: %s", file, out)
				}
			}
		}
		if strings.Contains(text, " style=") || regexp.MustCompile(` on[a-z]+=`).MatchString(text) || strings.Contains(text, "ZgotmplZ") {
			t.Errorf("%s: an attribute that the policy refuses", file)
		}
	}
	if !discoverytest.IsBrief() && len(validated) < 30 {
		t.Errorf("only %d claim templates", len(validated))
	}
}

// The web UI and the terminal show faults of the node as a whole, and a waiting device has doctor's
// code.
func TestPageSaysWhatIsWrongWithTheNode(t *testing.T) {
	inv := recordedInventory(t, "../../discovery/families/amdgpu/testdata/mi210x8.host", true)
	inv.Notes = []inventory.Note{{Name: "configuration", Reason: "no such field", Code: "CH0703"}}
	inv.Device("pci-0000-23-00-0").Move = &inventory.Move{To: discovery.ModeDRA, Reason: "moves to API DRA once it is free", Since: inv.At.Add(-time.Hour)}
	var b bytes.Buffer
	if err := web.RenderPage(&b, inv, web.Live{}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`title="chandler explain CH0703"`, "No such field.", `title="chandler explain CH0502"`, "Attention <span class=\"n\">2</span>"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the page lacks %s", want)
		}
	}
	b.Reset()
	if err := text.Print(&b, inv, terminal.Plain); err != nil || !strings.Contains(b.String(), "configuration: no such field; chandler explain CH0703") {
		t.Errorf("%v; the terminal has\n%s", err, b.String())
	}
}

// The web UI suggests only DeviceClasses that the cluster has.
func TestPageSuggestsInstalledClasses(t *testing.T) {
	facts := recordedFacts(t, "../../discovery/families/amdgpu/testdata/mi210x8.host")
	for installed, want := range map[string]string{"amdgpu.chandler.dev": "amdgpu.chandler.dev", "gpu.chandler.dev": "gpu.chandler.dev", "nvidia.chandler.dev": ""} {
		facts.Installed = func(class string) bool { return class == installed }
		inv := inventory.Make(facts)
		if ask := inv.Device("pci-0000-23-00-0").Ask; ask.Class != want || (ask.Template != "") != (want != "") {
			t.Errorf("with %s installed: %q", installed, ask.Class)
		}
		var b bytes.Buffer
		if err := web.RenderPage(&b, inv, web.Live{}); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(b.String(), "No installed DeviceClass") != (want == "") {
			t.Errorf("with %s installed: whether the page reports that no class selects a device", installed)
		}
	}
}

// The web UI marks devices that are created on demand, and no others.
func TestPageOfDevicesOnDemand(t *testing.T) {
	for name, made := range map[string]bool{"there": true, "not there yet": false} {
		inv := recordedInventory(t, "../../discovery/families/nvidia/testdata/h100-mig.host", true)
		for _, d := range inv.Devices {
			d.Uncreated = !made
		}
		var b bytes.Buffer
		if err := web.RenderPage(&b, inv, web.Live{}); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{`, created on demand">`, `<span class="none">free, created on demand</span>`} {
			if strings.Contains(b.String(), want) == made {
				t.Errorf("%s: whether the page has %s", name, want)
			}
		}
	}
}

// The panel of a device that DRA does not publish contains the reason.
func TestPageWithoutAccelerators(t *testing.T) {
	for host, want := range map[string]bool{kvmHost: true, eightGPUs: false} {
		var b bytes.Buffer
		if err := web.RenderPage(&b, recordedInventory(t, host, true), web.Live{}); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(b.String(), "Not published by DRA, because the mode is Auto and the host has no accelerators"); got != want {
			t.Errorf("%s: whether the page has the reason: %t", host, got)
		}
	}
}

// A pod with limits has its devices by these limits, whichever API serves them. Only the panel
// shows the scheduler's name for the claim.
func TestPageOfLimitsThatDRAServes(t *testing.T) {
	facts := recordedFacts(t, "../../discovery/families/amdgpu/testdata/mi210x8.host")
	facts.ConsumersKnown = true
	facts.Holders = []inventory.Holder{{
		Device: facts.Snapshot.Devices[0].Name, API: discovery.ModeDRA, Namespace: "lab", Pod: "nb", Container: "main",
		Claim: "nb-extended-resources-x7k2q", Request: "container-0-request-0", Resource: "amd.com/gpu",
	}}
	inv := inventory.Make(facts)
	var b bytes.Buffer
	if err := web.RenderPage(&b, inv, web.Live{}); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	if want := "<dt>Limits</dt><dd>amd.com/gpu <small>by claim nb-extended-resources-x7k2q</small>"; !strings.Contains(text, want) {
		t.Errorf("the page lacks %q", want)
	}
	if n := strings.Count(text, "nb-extended-resources"); n != 1 || strings.Contains(text, "container-0-request-0") {
		t.Errorf("the page names the scheduler's claim %d times", n)
	}
	var out bytes.Buffer
	if err := printInventory(&out, io.Discard, inv, "tree", true); err != nil || strings.Contains(out.String(), "extended-resources") {
		t.Errorf("%v: the terminal says\n%s", err, &out)
	}
}

// TestInventoryServes serves the web UI of a recorded host, and its data.
func TestInventoryServes(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out, in := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		cmd := newInventoryCommand()
		cmd.SetArgs([]string{"--serve=127.0.0.1:0", "../../discovery/families/amdgpu/testdata/mi300x-cpx.host"})
		cmd.SetOut(in)
		ended <- cmd.ExecuteContext(ctx)
	}()
	var address string
	if _, err := fmt.Fscanf(out, "The page is at %s", &address); err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, out) //nolint:errcheck // the rest of the line
	for path, want := range map[string]string{"": "Instinct MI300X OAM", "inventory.json": "\"host\": \"mi300x-cpx\""} {
		answer, err := http.Get(address + path) //nolint:noctx // the request ends with the test
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil || answer.StatusCode != http.StatusOK || !strings.Contains(string(text), want) || !answer.Uncompressed {
			t.Errorf("%s: %s, %v, compressed %v, %d bytes without %q", path, answer.Status, err, answer.Uncompressed, len(text), want)
		}
		if answer.Header.Get("Content-Security-Policy") != web.Policy {
			t.Errorf("%s: policy %q", path, answer.Header.Get("Content-Security-Policy"))
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A recorded host has no information about consumers. The web UI shows this, and marks no device as
// free or allocated.
func TestPageOfAHostWithoutConsumers(t *testing.T) {
	counted := regexp.MustCompile(`(?i)\b(free|allocated|nobody has)\b|>Consumers<`)
	for i, file := range recordedHosts(t) {
		if discoverytest.IsBrief() && i%4 != 0 {
			continue
		}
		inv := recordedInventory(t, file, false)
		var b bytes.Buffer
		if err := web.RenderPage(&b, inv, web.Live{}); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		_, body, _ := strings.Cut(b.String(), "<body")
		if len(inv.Devices) > 0 && !strings.Contains(body, "The consumers of devices are unknown") {
			t.Errorf("%s: the page does not mention that the consumers are unknown", file)
		}
		for line := range strings.Lines(said(body)) {
			if found := counted.FindString(line); found != "" {
				t.Errorf("%s: %q in %s", file, found, line)
			}
		}
	}
}

var (
	notSaid = regexp.MustCompile(`(?s)<thead>.*?</thead>|<script.*?</script>|<style.*?</style>|<pre.*?</pre>`) // text unrelated to devices
	titles  = regexp.MustCompile(`(?:title|aria-label)="([^"]*)"[^>]*>`)
	tags    = regexp.MustCompile(`<[^>]*>`)
)

// said returns the text of a page, with the tooltips.
func said(body string) string {
	body = notSaid.ReplaceAllString(body, "")
	return tags.ReplaceAllString(titles.ReplaceAllString(body, ">\n$1\n"), "\n")
}

// TestClassesAreCompiledAtTheFirstRead checks that an agent whose web UI is never opened does not
// compile the DeviceClasses.
func TestClassesAreCompiledAtTheFirstRead(t *testing.T) {
	facts := recordedFacts(t, "../../discovery/families/apex/testdata/dual.host")
	compiled, known := 0, false
	read := pageReader(
		func() (inventory.Facts, bool) { return facts, known },
		func() []inventory.Class { compiled++; return facts.Classes },
		func() string { return "1.37.0" },
	)
	if read() != nil || compiled != 0 {
		t.Errorf("compiled %d times before devices are known", compiled)
	}
	known = true
	for range 2 {
		if inv := read(); len(inv.Devices) == 0 || inv.Kubernetes != "1.37.0" {
			t.Errorf("%+v", inv)
		}
	}
	if compiled != 1 {
		t.Errorf("compiled %d times", compiled)
	}
}

// An agent whose web UI is never opened does not request the version of the API server. The web UI has
// the version once the API server has answered.
func TestVersionIsRequestedAtTheFirstRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		read := versionReader(ctx, client)
		if n := len(client.Actions()); n != 0 {
			t.Errorf("%d requests before the first read", n)
		}
		for range 2 {
			read()
			synctest.Wait()
		}
		if n := len(client.Actions()); n != 1 || read() == "" {
			t.Errorf("%d requests, version %q", n, read())
		}
	})
}
