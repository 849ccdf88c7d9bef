package fpgaaws_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/fpgaaws"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, fpgaaws.Family) }
