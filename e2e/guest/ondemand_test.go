package guest_test

import (
	"fmt"
	"strings"
	"testing"

	"chandler.dev/e2e/guest"
)

// made is a physical function of a real kernel whose virtual functions are created on demand and
// removed.
type made struct {
	*guest.Guest
	physical string
	dir      string // directory of the records
}

// now returns sriov_numvfs and the number of virtual functions.
func (m made) now(t *testing.T) string {
	t.Helper()
	return strings.TrimSpace(m.Sh(t, "cat /sys/bus/pci/devices/"+m.physical+"/sriov_numvfs; ls -d /sys/bus/pci/devices/"+m.physical+"/virtfn* 2>/dev/null | wc -l"))
}

// left returns the names of the records.
func (m made) left(t *testing.T) string {
	t.Helper()
	return strings.TrimSpace(m.Sh(t, "ls "+m.dir+" 2>/dev/null || true"))
}

// has checks the number of virtual functions, and whether there is a record.
func (m made) has(t *testing.T, count int) {
	t.Helper()
	if got, want := m.now(t), fmt.Sprintf("%d\n%d", count, count); got != want {
		t.Errorf("sriov_numvfs and links %q, want %q", got, want)
	}
	if left := m.left(t); (left != "") != (count > 0) {
		t.Errorf("written down: %q", left)
	}
}

// makes creates virtual functions and removes them. They must have the announced places and
// properties.
func (m made) makes(t *testing.T) {
	before := m.Must(t, "guestmake", "could", m.physical)
	if strings.Count(before, " false\n") != 3 {
		t.Errorf("could be made:\n%s", before)
	}
	m.has(t, 0)
	m.Must(t, "guestmake", "make", m.physical)
	m.has(t, 3)
	if now, want := m.Must(t, "guestmake", "could", m.physical), strings.ReplaceAll(before, "false", "true"); now != want {
		t.Errorf("made:\n%swant:\n%s", now, want)
	}
	for range 2 {
		m.Must(t, "guestmake", "undo", m.physical)
		m.has(t, 0)
	}
}

// refuses checks the refusal if the host uses a virtual function, and if the administrator has
// created one.
func (m made) refuses(t *testing.T) {
	device := "/sys/bus/pci/devices/" + m.physical
	m.Must(t, "guestmake", "make", m.physical)
	name := strings.TrimSpace(m.Sh(t, "ls "+device+"/virtfn1/net"))
	m.Must(t, "ip", "link", "set", name, "up")
	if got := m.Run(t, "guestmake", "undo", m.physical); got.Code == 0 || !strings.Contains(got.Stderr, name) {
		t.Errorf("undone while %s is up: %+v", name, got)
	}
	m.has(t, 3)
	m.Must(t, "ip", "link", "set", name, "down")
	m.Must(t, "guestmake", "undo", m.physical)
	m.has(t, 0)

	m.Sh(t, "echo 2 > "+device+"/sriov_numvfs")
	if got := m.Must(t, "guestmake", "make", m.physical); strings.Count(got, " true\n") != 2 || strings.Contains(got, "false") {
		t.Errorf("an administrator made two:\n%s", got)
	}
	m.Must(t, "guestmake", "undo", m.physical)
	if got := strings.TrimSpace(m.Sh(t, "cat "+device+"/sriov_numvfs; echo 0 > "+device+"/sriov_numvfs")); got != "2" {
		t.Errorf("%s are left of the administrator's two", got)
	}
	if got := m.Run(t, "guestmake", "-count=7", "make", m.physical); got.Code != 0 {
		t.Logf("all seven: %s", got.Stderr)
	}
	m.Must(t, "guestmake", "-count=7", "undo", m.physical)
	m.has(t, 0)
}

// killed kills each call before each of its writes. The next call continues, in either direction.
func (m made) killed(t *testing.T) {
	for _, then := range []string{"make", "undo"} {
		if got := m.Run(t, "guestmake", "-dies=0", "make", m.physical); got.Code != 9 {
			t.Fatalf("making: %+v", got)
		}
		if then == "make" {
			m.Must(t, "guestmake", "make", m.physical)
			m.has(t, 3)
			if got := m.Run(t, "guestmake", "-dies=0", "undo", m.physical); got.Code != 9 {
				t.Fatalf("undoing: %+v", got)
			}
			m.has(t, 3)
		}
		m.Must(t, "guestmake", "undo", m.physical)
		m.has(t, 0)
	}
}
