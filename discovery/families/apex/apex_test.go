package apex_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/apex"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, apex.Family) }
