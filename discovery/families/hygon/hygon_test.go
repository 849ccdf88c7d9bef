package hygon_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/hygon"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, hygon.Family) }
