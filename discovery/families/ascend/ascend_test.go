package ascend_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/ascend"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, ascend.Family) }
