//go:build cgo

package main

import (
	"flag"
	"io"
	"slices"
	"strings"
	"testing"
)

// The host service may write attributes of the list only.
func TestAllow(t *testing.T) {
	if allowed, err := parseAllowed("bind,reset"); err != nil || !slices.Equal(allowed, []string{"bind", "reset"}) {
		t.Error(allowed, err)
	}
	if allowed, err := parseAllowed(""); err != nil || allowed != nil {
		t.Error(allowed, err)
	}
	for _, list := range []string{"enable", "bind,", "bind,../x"} {
		if _, err := parseAllowed(list); err == nil || !strings.Contains(err.Error(), "is none of bind") {
			t.Errorf("%q: %v", list, err)
		}
	}
}

// A previous name of a flag is an error with the present name.
func TestRenamedFlag(t *testing.T) {
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	renamed(flags, "previous", "present")
	if err := flags.Parse([]string{"--previous=a"}); err == nil || !strings.Contains(err.Error(), "renamed to --present") {
		t.Error(err)
	}
	if err := flags.Parse(nil); err != nil {
		t.Error(err)
	}
}
