package discovery

import (
	"os"
	"path/filepath"
	"testing"
)

// A difference in any part of the key distinguishes two devices of the same name. An unknown part
// distinguishes nothing.
func TestDeviceKey(t *testing.T) {
	key := DeviceKey{Function: "0000:03:00.0", ID: "0x8086 0x1572 ", Identity: "serial", Inode: 7}
	for name, test := range map[string]struct {
		other DeviceKey
		same  bool
	}{
		"itself":               {key, true},
		"nothing is known":     {DeviceKey{}, true},
		"another function":     {DeviceKey{Function: "0000:04:00.0"}, false},
		"another card":         {DeviceKey{ID: "0x8086 0x1573 "}, false},
		"another serial":       {DeviceKey{Identity: "other"}, false},
		"registered again":     {DeviceKey{Function: key.Function, ID: key.ID, Identity: key.Identity, Inode: 8}, false},
		"another boot's inode": {DeviceKey{Function: key.Function, ID: key.ID}, true},
	} {
		if key.MayEqual(test.other) != test.same || test.other.MayEqual(key) != test.same {
			t.Errorf("%s: the same %t, want %t", name, !test.same, test.same)
		}
	}
}

// The key is read from the PCI function of the device.
func TestKeyOf(t *testing.T) {
	dir := t.TempDir()
	function := "sys/devices/pci0000:00/0000:03:00.0"
	if err := os.MkdirAll(filepath.Join(dir, function, "misc/d"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"vendor": "0x8086\n", "device": "0x1572\n"} {
		if err := os.WriteFile(filepath.Join(dir, function, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	host := &Host{FS: os.DirFS(dir)}
	key := KeyOf(host, &Device{Source: function + "/misc/d", Identity: "serial"})
	if key.Function != "0000:03:00.0" || key.ID != "0x8086 0x1572 " || key.Identity != "serial" || key.Inode == 0 {
		t.Errorf("%+v", key)
	}
	if key := KeyOf(host, &Device{Source: "sys/devices/virtual/misc/kvm"}); key != (DeviceKey{}) {
		t.Errorf("of no function: %+v", key)
	}
}
