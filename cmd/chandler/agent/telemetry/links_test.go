package telemetry

import (
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// The metrics include the present link of a device, but not of a suspended device, which the read
// would wake, or of a virtual function, which has no link.
func TestCurrentLinks(t *testing.T) {
	k := passthroughtest.New(t)
	d := rules.Offered{Device: discovery.Device{Name: "gpu", Source: passthroughtest.Source("0000:03:00.0"), Attributes: discovery.Attributes{}}}
	d.Attributes.SetInt("linkWidth", 16)
	virtual := d
	virtual.Name, virtual.Attributes = "virtual", discovery.Attributes{}
	k.Add("0000:03:00.0", "nvme", "3")
	set := func(name, text string) { k.File(d.Source+"/"+name, text+"\n") }
	set("current_link_width", "16")
	set("current_link_speed", "2.5 GT/s PCIe")
	set("power/runtime_status", "active")
	var r LinkReader
	read := func() map[string]pci.Link { return r.Read(k.Host(), []rules.Offered{d, virtual}) }
	if got := read(); len(got) != 1 || got["gpu"] != (pci.Link{Speed: 2500, Width: 16}) {
		t.Errorf("idle: %+v", got)
	}
	set("current_link_speed", "32.0 GT/s PCIe")
	if got := read(); got["gpu"].Speed != 32000 {
		t.Errorf("at work: %+v", got)
	}
	set("max_link_width", "1")
	if got := read(); len(got) != 0 { // the attributes have the link of another port
		t.Errorf("below a switch on the card: %+v", got)
	}
	set("max_link_width", "16")
	set("power/runtime_status", "suspended")
	if got := read(); len(got) != 0 {
		t.Errorf("suspended: %+v", got)
	}
}

// A read that a driver delays delays one request for metrics, by a second, and no other request
// until it ends.
func TestReadOfLinksHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := passthroughtest.New(t)
		k.Add("0000:03:00.0", "nvme", "3")
		k.File(passthroughtest.Source("0000:03:00.0")+"/current_link_width", "4\n")
		hangs := make(chan struct{})
		host := &discovery.Host{FS: passthroughtest.HangFile(k.FS(), "current_link_width", hangs)}
		d := rules.Offered{Device: discovery.Device{Name: "d", Source: passthroughtest.Source("0000:03:00.0"), Attributes: discovery.Attributes{}}}
		d.Attributes.SetInt("linkWidth", 4)
		var r LinkReader
		for _, want := range []time.Duration{linkLimit, 0} {
			began := time.Now()
			if got := r.Read(host, []rules.Offered{d}); len(got) > 0 || time.Since(began) != want {
				t.Errorf("after %s: %+v, want nothing after %s", time.Since(began), got, want)
			}
		}
		close(hangs)
		synctest.Wait()
		if got := r.Read(host, []rules.Offered{d}); got["d"].Width != 4 {
			t.Errorf("after the read has ended: %+v", got)
		}
	})
}
