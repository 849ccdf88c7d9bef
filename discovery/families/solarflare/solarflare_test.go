package solarflare_test

import (
	"slices"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/solarflare"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, solarflare.Family) }

// What is preloaded is what is mounted, where anything is.
func TestGrant(t *testing.T) {
	for file, want := range map[string][]string{
		"testdata/x2522.host":  {"LD_PRELOAD=/opt/onload/usr/lib64/libonload.so"},
		"testdata/images.host": nil,
	} {
		given := discovery.Scan(discoverytest.Layout(t, file), []*discovery.Family{solarflare.Family}).Devices
		if got := solarflare.Family.Grant(given, discovery.Grant{}).Env; !slices.Equal(got, want) {
			t.Errorf("%s: got %q; want %q", file, got, want)
		}
	}
}
