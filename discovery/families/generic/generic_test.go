package generic_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/generic"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, generic.Family) }
