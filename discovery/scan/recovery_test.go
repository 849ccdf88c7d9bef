package scan

import (
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Directories of a port, of an adapter below the port with a virtual function, and of another
// adapter.
const (
	recoveryPort     = "sys/devices/pci0000:00/0000:00:01.0"
	recoveryPhysical = recoveryPort + "/0000:03:00.0"
	recoveryVirtual  = recoveryPort + "/0000:03:10.0"
	recoveryOther    = "sys/devices/pci0000:00/0000:00:02.0/0000:04:00.0"
)

// event returns a kernel event as read from the socket.
func event(action, function string, more ...string) []byte {
	path := strings.TrimPrefix(function, "sys")
	return []byte(strings.Join(append([]string{action + "@" + path, "ACTION=" + action, "DEVPATH=" + path, "SUBSYSTEM=pci"}, more...), "\x00") + "\x00SEQNUM=7\x00")
}

// A function that the kernel could not recover is unhealthy until a recovery succeeds or a driver
// binds again. Functions below a port, and virtual functions, follow. The events have the form of
// pci_uevent_ers.
func TestRecoveries(t *testing.T) {
	const failed, recovered, begins = "ERROR_EVENT=FAILED_RECOVERY", "ERROR_EVENT=SUCCESSFUL_RECOVERY", "ERROR_EVENT=BEGIN_RECOVERY"
	const own, ofPort, ofPhysical = "the kernel could not recover it from a PCIe error", "the kernel could not recover 0000:00:01.0 from a PCIe error", "the kernel could not recover 0000:03:00.0 from a PCIe error"
	tests := map[string]struct {
		events                   [][]byte
		physical, virtual, other string
	}{
		"nothing was heard": {},
		"a recovery that succeeds": {events: [][]byte{
			event("change", recoveryPhysical, begins, "DEVICE_ONLINE=0"), event("change", recoveryPhysical, recovered, "DEVICE_ONLINE=1"),
		}},
		"a physical function": {
			events:   [][]byte{event("change", recoveryPhysical, failed, "DEVICE_ONLINE=0")},
			physical: own, virtual: ofPhysical,
		},
		"a virtual function": {
			events:  [][]byte{event("change", recoveryVirtual, failed, "DEVICE_ONLINE=0")},
			virtual: own,
		},
		"a port":      {events: [][]byte{event("change", recoveryPort, failed)}, physical: ofPort, virtual: ofPort},
		"then well":   {events: [][]byte{event("change", recoveryPort, failed), event("change", recoveryPhysical, recovered)}},
		"then bound":  {events: [][]byte{event("change", recoveryPort, failed), event("bind", recoveryPhysical, "DRIVER=igb")}},
		"one of them": {events: [][]byte{event("change", recoveryPort, failed), event("bind", recoveryVirtual)}, physical: ofPort},
		"and again": {
			events:   [][]byte{event("change", recoveryPhysical, failed), event("bind", recoveryPhysical), event("change", recoveryPhysical, failed)},
			physical: own, virtual: ofPhysical,
		},
		"then removed and found again": {events: [][]byte{event("change", recoveryPhysical, failed), event("remove", recoveryPhysical), event("add", recoveryPhysical)}},
		"another":                      {events: [][]byte{event("change", recoveryOther, failed), event("unbind", recoveryOther)}, other: own},
		"not a PCI function":           {events: [][]byte{[]byte("change@/devices/x\x00DEVPATH=/devices/x\x00SUBSYSTEM=usb\x00" + failed + "\x00")}},
		"garbage":                      {events: [][]byte{nil, []byte("libudev\x00\xfe\xed"), []byte("=\x00=\x00")}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			recoveries := new(Recoveries)
			host := &discovery.Host{RecoveryFailure: recoveries.FailureReason, FS: fstest.MapFS{recoveryVirtual + "/physfn": {Data: []byte("../0000:03:00.0"), Mode: fs.ModeSymlink}}}
			for _, function := range []string{recoveryPhysical, recoveryVirtual, recoveryOther} {
				host.FS.(fstest.MapFS)[function+"/class"] = &fstest.MapFile{Data: []byte("0x020000\n")}
			}
			for _, message := range test.events {
				recoveries.readEvent(ueventVariables(message))
			}
			for function, want := range map[string]string{recoveryPhysical: test.physical, recoveryVirtual: test.virtual, recoveryOther: test.other} {
				devices := []discovery.Device{{Name: "d", Source: function}}
				pci.NewHealthReader(host).AddReadings(devices)
				got := ""
				for _, reading := range devices[0].Readings {
					got += string(reading.Key()) + ": " + reading.Reason
				}
				if want != "" {
					want = "unhealthy: " + want
				}
				if got != want {
					t.Errorf("%s: %q, want %q", sysfs.At(host.FS, function).Name(), got, want)
				}
			}
		})
	}
}
