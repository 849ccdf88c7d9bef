package intelgpu_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/intelgpu"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, intelgpu.Family) }
