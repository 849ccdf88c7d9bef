//go:build cgo

package main

import (
	"flag"
	"io"
	"strings"
	"testing"
)

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
