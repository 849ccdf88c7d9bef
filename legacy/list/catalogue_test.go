package list

import "testing"

func TestShareOf(t *testing.T) {
	for id, want := range map[string]string{"GPU-1::3": "GPU-1", "GPU-a": "", "GPU-1": "GPU", "GPU-1::": "", "GPU-1-_-7": "GPU-1", "nvidia0/vgpu1": "nvidia0", "a::b": "", "a::1::2": "a::1"} {
		if got, share := shareOf(id); got != want || share != (want != "") {
			t.Errorf("%s: %q, %t", id, got, share)
		}
	}
}
