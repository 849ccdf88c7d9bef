package gather

import (
	"testing"

	"chandler.dev/internal/doctor"
)

// A host without the kernel's /proc is a fault only if its /sys is the kernel's. A directory with
// neither is a copy of a host.
func TestKernelProc(t *testing.T) {
	for name, test := range map[string]struct {
		sys, proc bool
		codes     int
		unknown   bool
	}{
		"a host":                      {sys: true, proc: true},
		"a host with another /proc":   {sys: true, codes: 1},
		"a copy of a host":            {unknown: true},
		"a copy with the host's proc": {proc: true},
	} {
		f := &doctor.Facts{Host: doctor.HostFacts{Proc: kernelProc(test.sys, test.proc)}}
		if (f.Host.Proc.Unknown != "") != test.unknown {
			t.Errorf("%s: unknown: %q", name, f.Host.Proc.Unknown)
		}
		found := 0
		for _, code := range doctor.JudgeFacts(f, doctor.Host).Codes() {
			if code == "CH0409" {
				found++
			}
		}
		if found != test.codes {
			t.Errorf("%s: CH0409 is reported %d times, want %d", name, found, test.codes)
		}
	}
}
