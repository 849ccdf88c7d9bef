package fpgaxilinx_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/fpgaxilinx"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, fpgaxilinx.Family) }
