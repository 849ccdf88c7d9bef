package scan

import (
	"context"
	"net"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"
)

// FollowInterfaces sees a renamed interface within about a second, without an event.
func TestFollowInterfaces(t *testing.T) {
	root := t.TempDir()
	class := filepath.Join(root, netClass)
	if err := os.MkdirAll(class, 0o755); err != nil {
		t.Fatal(err)
	}
	link := func(name string) string { return filepath.Join(class, name) }
	lay := func(name string) {
		if err := os.Symlink("../../devices/pci0000:00/0000:03:00.0/net/"+name, link(name)); err != nil {
			t.Fatal(err)
		}
	}
	lay("eth0")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		events, ended := make(chan Changes, 1), make(chan struct{})
		go func() {
			defer close(ended)
			FollowInterfaces(ctx, os.DirFS(root), time.Second, events)
		}()
		for _, step := range []struct {
			from, to string
			want     int
		}{{"eth0", "eth0", 0}, {"eth0", "lan1", 1}, {"lan1", "lan1", 0}, {"lan1", "eth0", 1}} {
			synctest.Wait()
			if err := os.Remove(link(step.from)); err != nil {
				t.Fatal(err)
			}
			lay(step.to)
			time.Sleep(5 * time.Second)
			if len(events) != step.want {
				t.Errorf("%+v: %d events", step, len(events))
			}
			if len(events) > 0 {
				var names []string
				for _, e := range (<-events).Uevents {
					names = append(names, path.Base(e.Path)+" "+e.Subsystem)
				}
				if want := []string{step.from + " net", step.to + " net"}; !slices.Equal(names, want) {
					t.Errorf("%+v: events of %q, want %q", step, names, want)
				}
			}
		}
		cancel()
		<-ended
	})
}

// A host whose interfaces have other numbers or addresses is in another network namespace.
func TestSharesNetwork(t *testing.T) {
	own, err := net.Interfaces()
	if err != nil || len(own) == 0 {
		t.Skip("no interfaces")
	}
	lay := func(change func(i *net.Interface)) string {
		root := t.TempDir()
		for _, i := range own {
			change(&i)
			real := filepath.Join(root, "sys/devices/virtual/net", i.Name)
			address := i.HardwareAddr.String()
			if address == "" {
				address = "00:00:00:00:00:00"
			}
			for name, text := range map[string]string{"ifindex": strconv.Itoa(i.Index), "address": address} {
				if err := os.MkdirAll(real, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(real, name), []byte(text+"\n"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.MkdirAll(filepath.Join(root, netClass), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink("../../devices/virtual/net/"+i.Name, filepath.Join(root, netClass, i.Name)); err != nil {
				t.Fatal(err)
			}
		}
		return root
	}
	if !SharesNetwork(os.DirFS(lay(func(*net.Interface) {}))) {
		t.Error("the same interfaces: not shared")
	}
	if SharesNetwork(os.DirFS(lay(func(i *net.Interface) { i.Index += 10 }))) {
		t.Error("other numbers: shared")
	}
	more := lay(func(*net.Interface) {})
	if err := os.Symlink("../../devices/virtual/net/more", filepath.Join(more, netClass, "more0")); err != nil {
		t.Fatal(err)
	}
	if SharesNetwork(os.DirFS(more)) {
		t.Error("one more: shared")
	}
}
