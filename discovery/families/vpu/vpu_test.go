package vpu_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/vpu"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, vpu.Family) }
