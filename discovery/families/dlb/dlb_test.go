package dlb_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/dlb"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, dlb.Family) }
