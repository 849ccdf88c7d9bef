package amdgpu_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/amdgpu"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, amdgpu.Family) }
