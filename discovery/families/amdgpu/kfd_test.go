package amdgpu

import "testing"

func TestLocate(t *testing.T) {
	known := map[string]bool{"0000:0a:00.0": true, "0001:0b:00.0": true, "0000:08:02.3": true}
	for name, test := range map[string]struct {
		domain, location uint64
		address          string
		index            int
	}{
		"whole":                   {0, 0x0a00, "0000:0a:00.0", 0},
		"partition, AMD's":        {0, 0x0a03, "0000:0a:00.0", 3},
		"partition, the kernel's": {1, 5<<28 | 0x0b00, "0001:0b:00.0", 5},
		"virtual function":        {0, 0x0813, "0000:08:02.3", 0},
		"another domain":          {2, 0x0a00, "", 0},
		"not ours":                {0, 0x0c00, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			address, index := locateNode(map[string]uint64{"domain": test.domain, "location_id": test.location}, known)
			if address != test.address || index != test.index {
				t.Errorf("got %s, %d", address, index)
			}
		})
	}
}

func FuzzProperties(f *testing.F) {
	f.Add("cpu_cores_count 0\nsimd_count 416\nsimd_per_cu 4\ngfx_target_version 90010\nlocation_id 8960\n")
	f.Add("")
	f.Add("simd_count -1\n")
	f.Add("simd_count 18446744073709551616\n")
	f.Add("a\n\nb c d\n")
	f.Fuzz(func(t *testing.T, text string) {
		properties, err := parseProperties(text)
		if (err == nil) != (len(properties) > 0) {
			t.Errorf("%v, %v", properties, err)
		}
		locateNode(properties, nil)
	})
}
