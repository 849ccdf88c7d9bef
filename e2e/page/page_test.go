package page

import (
	"context"
	"flag"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	cdppage "github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/web"
)

var all = flag.Bool("all", false, "open every recorded host, not two of each family")

// browser is shared by all tests.
var browser context.Context

func TestMain(m *testing.M) {
	flag.Parse()
	var end func()
	var err error
	if browser, end, err = Browser(context.Background()); err != nil {
		fmt.Fprintf(os.Stderr, "\n***\n*** NOT TESTED in a browser: %v\n***\n\n", err)
		os.Exit(0)
	}
	code := m.Run()
	end()
	os.Exit(code)
}

// tab is a browser tab that shows the web UI.
type tab struct {
	t   *testing.T
	ctx context.Context
	url string
	inv atomic.Pointer[inventory.Inventory]

	server *httptest.Server

	mu       sync.Mutex
	problems []string // reported by the browser: errors, and violations of the content security policy
}

// open shows an inventory in a new tab.
func open(t *testing.T, facts inventory.Facts) *tab {
	t.Helper()
	b := &tab{t: t}
	b.inv.Store(inventory.Make(facts))
	b.server = httptest.NewServer((&web.Server{Read: b.inv.Load}).Handler())
	t.Cleanup(func() { b.server.CloseClientConnections(); b.server.Close() })
	b.url = b.server.URL + "/"
	ctx, end := chromedp.NewContext(browser)
	t.Cleanup(end)
	b.ctx = ctx
	chromedp.ListenTarget(ctx, func(event any) {
		b.mu.Lock()
		defer b.mu.Unlock()
		switch event := event.(type) {
		case *log.EventEntryAdded:
			if event.Entry.Level == log.LevelError {
				b.problems = append(b.problems, event.Entry.Text)
			}
		case *runtime.EventExceptionThrown:
			b.problems = append(b.problems, event.ExceptionDetails.Error())
		case *cdppage.EventJavascriptDialogOpening:
			b.problems = append(b.problems, "dialog: "+event.Message)
		}
	})
	b.do(log.Enable(), b.window(1280, 800), chromedp.Navigate(b.url))
	return b
}

func (b *tab) window(width, height int64) chromedp.Action {
	return chromedp.EmulateViewport(width, height)
}

// do runs actions, which take almost no time.
func (b *tab) do(actions ...chromedp.Action) {
	b.t.Helper()
	if err := chromedp.Run(b.ctx, actions...); err != nil {
		b.t.Fatal(err)
	}
}

// js evaluates an expression.
func js[T any](b *tab, expression string) (value T) {
	b.t.Helper()
	b.do(chromedp.Evaluate(expression, &value))
	return value
}

// wait waits until an expression is true.
func (b *tab) wait(expression string) {
	b.t.Helper()
	for end := time.Now().Add(5 * time.Second); !js[bool](b, expression); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			b.t.Fatalf("waited in vain for %s", expression)
		}
	}
}

// clean fails the test if the browser has reported problems.
func (b *tab) clean() {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, problem := range b.problems {
		b.t.Errorf("the browser says: %s", problem)
	}
	b.problems = nil
}

func example(t *testing.T) inventory.Facts {
	t.Helper()
	facts, err := Example()
	if err != nil {
		t.Fatal(err)
	}
	return facts
}

func recordedHost(t *testing.T, family, name string) inventory.Facts {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../discovery/families", family, "testdata", name+".host"))
	if err != nil {
		t.Fatal(err)
	}
	facts, err := Recorded(name, text)
	if err != nil {
		t.Fatal(err)
	}
	facts.Recorded = name + ".host"
	return facts
}

// many returns a host with 512 virtual functions on 32 devices in eight NUMA nodes. Pods have a
// third of the functions.
func many(t *testing.T) inventory.Facts {
	t.Helper()
	facts := recordedHost(t, "qat", "4xxx")
	facts.Recorded, facts.ConsumersKnown = "", true
	var like discovery.Device
	for _, d := range facts.Snapshot.Devices {
		if d.Attributes.String("function") == "virtual" {
			like = d.Device
		}
	}
	if like.Name == "" {
		t.Fatal("no virtual function")
	}
	offered := facts.Snapshot.Devices[:0:0]
	for i := range 512 {
		bus := 0x10 + 6*(i/16)
		d := facts.Snapshot.Devices[0]
		d.Device = like
		physical := fmt.Sprintf("pci-0000-%02x-00-0", bus)
		address := fmt.Sprintf("0000:%02x:%02x.%d", bus, 1+i%16/8, i%8)
		d.Name = "pci-" + strings.NewReplacer(":", "-", ".", "-").Replace(address)
		d.Source = fmt.Sprintf("sys/devices/pci0000:%02x/0000:%02x:01.0/%s", bus-1, bus-1, address)
		d.PartOf = &discovery.Silicon{Name: physical}
		d.Health = discovery.Health{Status: discovery.Healthy}
		d.Attributes = discovery.Attributes{}
		for name, value := range like.Attributes {
			d.Attributes[name] = value
		}
		d.Attributes.SetInt("vfIndex", int64(i%16))
		d.Attributes.SetInt("resource.kubernetes.io/numaNode", int64(i/64))
		d.Attributes.SetString("resource.kubernetes.io/pciBusID", address)
		d.Attributes.SetString("parent", physical)
		if i%3 == 0 {
			facts.Holders = append(facts.Holders, inventory.Holder{Device: d.Name, API: discovery.ModeDRA, Namespace: "gw", Pod: fmt.Sprintf("envoy-%d", i/16), Claim: "qat", Request: "qat", Since: Now})
		}
		offered = append(offered, d)
	}
	facts.Snapshot.Devices = offered
	return facts
}

// TestRecordedHosts opens two hosts of each family, or all hosts. The content must not overflow the
// window, and the browser must report no problems.
func TestRecordedHosts(t *testing.T) {
	files, err := filepath.Glob("../../discovery/families/*/testdata/*.host")
	if err != nil {
		t.Fatal(err)
	}
	var b *tab
	seen := make(map[string]int)
	for _, file := range files {
		dir := filepath.Base(filepath.Dir(filepath.Dir(file)))
		facts := recordedHost(t, dir, strings.TrimSuffix(filepath.Base(file), ".host"))
		if seen[dir]++; seen[dir] > 2 && !*all {
			continue
		}
		if b == nil {
			b = open(t, facts)
		}
		b.inv.Store(inventory.Make(facts))
		b.do(chromedp.Navigate(b.url))
		shown := js[[]string](b, `[...document.querySelectorAll('.machine a[href^="#"]')].map(a => a.getAttribute('href').slice(1))`)
		for _, d := range b.inv.Load().Devices {
			if len(b.inv.Load().Devices) > 0 && !contains(shown, d.Name) && !contains(shown, d.Silicon) {
				t.Errorf("%s: device %s is not shown", file, d.Name)
			}
		}
		if wide := js[int](b, `document.documentElement.scrollWidth - innerWidth`); wide > 0 {
			t.Errorf("%s: %d pixels stick out", file, wide)
		}
		b.clean()
	}
}

func contains(all []string, one string) bool {
	for _, s := range all {
		if s == one {
			return true
		}
	}
	return false
}

// TestWidths opens the web UI in windows from a narrow phone to a wall display. The content must
// not overflow, also with an open panel. A panel on the left must not move the machine.
func TestWidths(t *testing.T) {
	for name, facts := range map[string]inventory.Facts{
		"example": example(t), "512": many(t), "cpx": recordedHost(t, "amdgpu", "mi300x-cpx"), "trn2": recordedHost(t, "neuron", "trn2"), "broken": recordedHost(t, "nvidia", "broken"),
	} {
		b := open(t, facts)
		b.wait(`document.querySelectorAll('.machine a').length > 0`)
		for _, width := range []int64{320, 390, 736, 737, 1119, 1120, 1280, 1855, 1856, 2560, 3840} {
			b.do(b.window(width, 900))
			if out := js[string](b, sticksOut); out != "" {
				t.Errorf("%s at %d: %s", name, width, out)
			}
			before := js[float64](b, `document.querySelector('.machine').getBoundingClientRect().left`)
			b.do(chromedp.Evaluate(`document.querySelector('.machine a').click()`, nil))
			b.wait(`[...document.querySelectorAll('.panel')].some(p => getComputedStyle(p).display == 'block')`)
			if out := js[string](b, sticksOut); out != "" {
				t.Errorf("%s at %d with a panel: %s", name, width, out)
			}
			if after := js[float64](b, `document.querySelector('.machine').getBoundingClientRect().left`); after != before {
				t.Errorf("%s at %d: the machine moves from %v to %v for the panel", name, width, before, after)
			}
			b.do(chromedp.Evaluate(`document.querySelector('.panel:target .x, .panel:has(:target) .x').click()`, nil))
		}
		b.clean()
	}
}

const sticksOut = `(() => {
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  if (wide <= 0) return '';
  const worst = [...document.querySelectorAll('body *')].filter(e => !e.closest('.skip,.vh,.sprite')).sort((a, b) => b.getBoundingClientRect().right - a.getBoundingClientRect().right)[0];
  return wide + ' pixels stick out, ' + worst.tagName + '.' + worst.className;
})()`

// TestRailsOfANode opens a host with two hives, each within one NUMA node. In both layouts, side by
// side and one below the other, the links of the second hive must begin at its first device.
func TestRailsOfANode(t *testing.T) {
	b := open(t, recordedHost(t, "amdgpu", "mi210x8"))
	b.wait(`document.querySelectorAll('.numa .rail.loc').length >= 4`)
	for _, width := range []int64{390, 1280} {
		b.do(b.window(width, 900))
		if n := js[int](b, `[...document.querySelectorAll('.numa')].filter(n => n.querySelector('.rail.loc').getBoundingClientRect().top < n.querySelector('.root').getBoundingClientRect().top).length`); n > 0 {
			t.Errorf("at %d, the links of %d NUMA nodes begin above their devices", width, n)
		}
	}
	b.clean()
}

// TestContrast computes the contrast of all text and glyphs with their background, in both themes
// (WCAG 2.2, 1.4.3 and 1.4.11).
func TestContrast(t *testing.T) {
	b := open(t, example(t))
	for _, theme := range []string{"light", "dark"} {
		b.do(emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: theme}}))
		for _, at := range []string{"", "#pci-0000-9e-00-0", "#pci-0000-3e-00-0", "#pci-0000-ce-00-0"} {
			b.do(chromedp.Evaluate(`location.hash = "`+at+`"`, nil))
			for _, bad := range js[[]string](b, contrast) {
				t.Errorf("%s%s: %s", theme, at, bad)
			}
		}
	}
	b.do(emulation.SetEmulatedMedia())
}

const contrast = `(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const rgba = c => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); const d = canvas.getImageData(0, 0, 1, 1).data; return [d[0], d[1], d[2], d[3] / 255] };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const light = c => { const l = c.slice(0, 3).map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * l[0] + .7152 * l[1] + .0722 * l[2] };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05) };
  const ground = e => { const all = []; for (; e; e = e.parentElement) all.push(rgba(getComputedStyle(e).backgroundColor)); return all.reverse().reduce((below, c) => over(c, below), [255, 255, 255, 1]) };
  const seen = new Map();
  const check = (e, c, least, what) => { const r = ratio(over(rgba(c), ground(e)), ground(e)); if (r < least) seen.set(what, what + ': ' + r.toFixed(2) + ' < ' + least) };
  const visible = e => e.checkVisibility() && e.getClientRects().length > 0 && !e.closest('.vh,.skip,.sprite');
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n; n = walk.nextNode();) { const e = n.parentElement; if (n.data.trim() && visible(e) && !/STYLE|SCRIPT/.test(e.tagName)) check(e, getComputedStyle(e).color, 4.5, e.tagName + '.' + e.className + ' "' + n.data.trim().slice(0, 20) + '"') }
  for (const g of document.querySelectorAll('.g')) if (visible(g)) check(g.parentElement, getComputedStyle(g).color, 3, 'glyph ' + g.getAttribute('class') + ' in ' + g.parentElement.className);
  return [...seen.values()];
})()`

// TestKeyboard uses the web UI without a mouse.
func TestKeyboard(t *testing.T) {
	b := open(t, example(t))
	b.do(chromedp.KeyEvent("/"))
	b.wait(`document.activeElement.id == 'q'`)
	// The protocol enters the key although the web UI prevents its default action.
	b.do(chromedp.Evaluate(`q.value = ''`, nil), chromedp.KeyEvent("llama gpu"))
	b.wait(`document.querySelector('.filter output').textContent == '3 of 19'`)
	if dim := js[int](b, `document.querySelectorAll('.dev.dim').length`); dim != 16 {
		t.Errorf("%d devices fade, want 16", dim)
	}
	b.do(chromedp.KeyEvent(kb.Escape))
	b.wait(`q.value == '' && document.querySelectorAll('.dim').length == 0`)
	at := func() string {
		return js[string](b, `document.activeElement.hash || document.activeElement.id || document.activeElement.tagName`)
	}
	b.do(chromedp.Evaluate(`document.querySelector('.machine a[href="#pci-0000-1a-00-0"]').focus()`, nil))
	for _, step := range []struct{ key, want string }{
		{kb.ArrowDown, "#pci-0000-1b-00-0"}, {kb.ArrowRight, "#pci-0000-3e-00-0"}, {kb.ArrowUp, "#pci-0000-3d-00-0"}, {kb.ArrowRight, "#pci-0000-9d-00-0"}, {kb.ArrowLeft, "#pci-0000-3d-00-0"},
	} {
		b.do(chromedp.KeyEvent(step.key))
		if got := at(); got != step.want {
			t.Fatalf("after %q the focus is at %s, want %s", step.key, got, step.want)
		}
	}
	mates := js[int](b, `(document.querySelector('.machine a[href="#pci-0000-1a-00-0"]').focus(), document.querySelectorAll('.dev.mate').length)`)
	if mates != 3 {
		t.Errorf("%d devices of the same pod are outlined, want 3", mates)
	}
	b.do(chromedp.KeyEvent(kb.Enter))
	b.wait(`location.hash == '#pci-0000-1a-00-0' && getComputedStyle(document.getElementById('pci-0000-1a-00-0')).display == 'block'`)
	b.wait(`document.querySelectorAll('#pci-0000-1a-00-0 .copy button').length > 3`)
	b.do(chromedp.KeyEvent(kb.ArrowRight))
	b.wait(`location.hash == '#pci-0000-3d-00-0'`)
	b.do(chromedp.KeyEvent(kb.Escape))
	b.wait(`location.hash == ''`)
	if got := at(); !strings.HasPrefix(got, "#pci-") {
		t.Errorf("after the panel was closed the focus is at %s", got)
	}
	b.clean()
}

// TestWithoutJavaScript opens a panel by its address alone.
func TestWithoutJavaScript(t *testing.T) {
	facts := example(t)
	b := open(t, facts)
	b.do(emulation.SetScriptExecutionDisabled(true), chromedp.Navigate(b.url+"#pci-0000-9e-00-0"), chromedp.Reload())
	if !js[bool](b, `getComputedStyle(document.getElementById('pci-0000-9e-00-0')).display == 'block' && getComputedStyle(document.getElementById('pci-0000-1a-00-0')).display == 'none'`) {
		t.Error("the panel is not shown, or another is")
	}
	if !js[bool](b, `document.querySelector('.filter').hidden && document.querySelector('#live').textContent.startsWith('As of') && document.querySelectorAll('.copy button').length == 0`) {
		t.Error("something is shown that needs JavaScript")
	}
	part := open(t, recordedHost(t, "amdgpu", "mi300x-cpx"))
	part.do(emulation.SetScriptExecutionDisabled(true), chromedp.Navigate(part.url+"#pci-0000-05-00-0-xcp-3"), chromedp.Reload())
	if !js[bool](part, `getComputedStyle(document.getElementById('pci-0000-05-00-0')).display == 'block'`) {
		t.Error("the panel of a part is not shown")
	}
}

// TestLive changes the consumer of a device. The web UI must follow, without changes to focus,
// filter, panel and scroll position. When the agent ends, the web UI must report it.
func TestLive(t *testing.T) {
	facts := example(t)
	facts.At = time.Now()
	b := open(t, facts)
	b.wait(`document.querySelector('#live').textContent.startsWith('Live, last change')`)
	b.do(chromedp.Evaluate(`location.hash = 'pci-0000-3d-00-0'`, nil), chromedp.Evaluate(`q.focus()`, nil), chromedp.KeyEvent("gpu"))
	b.do(chromedp.Evaluate(`window.same = document.querySelector('.machine a[href="#pci-0000-3d-00-0"]'), scrollTo({top: 50, behavior: 'instant'}), window.scrolled = scrollY`, nil))
	facts.Holders = append(facts.Holders, inventory.Holder{Device: "pci-0000-3d-00-0", API: discovery.ModeDRA, Namespace: "ml", Pod: "new-one", Claim: "c", Request: "gpu", Since: facts.At})
	b.inv.Store(inventory.Make(facts))
	b.wait(`document.querySelector('.machine a[href="#pci-0000-3d-00-0"]').textContent.includes('ml/new-one')`)
	for _, stays := range []string{
		`window.same === document.querySelector('.machine a[href="#pci-0000-3d-00-0"]')`,
		`same.parentElement.classList.contains('sel') && same.parentElement.classList.contains('flash')`,
		`document.activeElement.id == 'q' && q.value == 'gpu' && document.querySelector('.filter output').textContent == '8 of 19'`,
		`getComputedStyle(document.getElementById('pci-0000-3d-00-0')).display == 'block' && scrollY == scrolled`,
		`document.querySelectorAll('#pci-0000-3d-00-0 .copy button').length == document.querySelectorAll('#pci-0000-3d-00-0 .copy').length`,
		`[...document.querySelectorAll('.holders b')].some(b => b.textContent == 'new-one')`,
		`document.querySelector('.stock .free').textContent == '3'`,
	} {
		if !js[bool](b, stays) {
			t.Errorf("after a change: %s; %s", stays, js[string](b, `[document.activeElement.tagName, q.value, document.querySelector('.filter output').textContent, scrollY, scrolled, location.hash].join(' ')`))
		}
	}
	b.clean()
	b.server.CloseClientConnections()
	b.server.Listener.Close()
	b.wait(`document.querySelector('#live').textContent.startsWith('Not live since ')`)
}

// TestHostile shows names from the host that contain HTML.
func TestHostile(t *testing.T) {
	const evil = `<script>alert(1)</script>"'><img src=x onerror=alert(2)>${7*7}`
	facts := example(t)
	facts.Name = evil
	for i := range facts.Snapshot.Devices {
		d := &facts.Snapshot.Devices[i]
		d.Attributes = discovery.Attributes{}
		for name, value := range facts.Snapshot.Devices[i].Device.Attributes {
			d.Attributes[name] = value
		}
		for _, name := range []resourceapi.QualifiedName{"model", "kind", "uuid", "profile", "vendor", "fabric"} {
			value := evil
			d.Attributes[name] = discovery.Attribute{StringValue: &value}
		}
		d.Health = discovery.Health{Status: discovery.Unhealthy, Reason: evil}
	}
	for i := range facts.Holders {
		facts.Holders[i].Pod, facts.Holders[i].Claim, facts.Holders[i].Resource = evil, evil, evil
	}
	facts.Snapshot.Problems = []discovery.Problem{{Device: evil, Err: fmt.Errorf("%s", evil)}}
	b := open(t, facts)
	b.wait(`document.querySelector('h1') !== null`)
	if h1 := js[string](b, `document.querySelector('h1').textContent`); h1 != evil {
		t.Errorf("the name is %q", h1)
	}
	if n := js[int](b, `document.querySelectorAll('img').length + document.querySelectorAll('script').length`); n != 1 {
		t.Errorf("%d images and scripts, want the page's own script", n)
	}
	b.do(chromedp.Evaluate(`document.querySelector('.machine a').click()`, nil))
	b.clean()
}

// TestMany opens 512 devices. The web UI must be quick and small.
func TestMany(t *testing.T) {
	b := open(t, many(t))
	b.wait(`document.querySelectorAll('.cells a').length == 512`)
	took := js[float64](b, `performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd`)
	size := js[float64](b, `performance.getEntriesByType('navigation')[0].encodedBodySize`)
	t.Logf("512 devices: %.0f ms, %.0f bytes", took, size)
	if size > 100_000 {
		t.Errorf("%.0f bytes, compressed", size)
	}
	if stops := js[int](b, `document.querySelectorAll('.cells a:not([tabindex="-1"])').length`); stops != 32 {
		t.Errorf("%d tab stops in cells, want one for each block", stops)
	}
	b.clean()
}

// TestStrangers requests the web UI by different host names. A name that resolves to this machine
// but is not local must be refused.
func TestStrangers(t *testing.T) {
	inv := inventory.Make(example(t))
	handler := (&web.Server{Read: func() *inventory.Inventory { return inv }}).Handler()
	for host, want := range map[string]int{"localhost:8083": 200, "127.0.0.1": 200, "[::1]:8083": 200, "evil.example:8083": 421} {
		request := httptest.NewRequest("GET", "/", nil)
		request.Host = host
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, request)
		if answer.Code != want {
			t.Errorf("%s: %d, want %d", host, answer.Code, want)
		}
	}
}
