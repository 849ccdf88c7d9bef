package sriovnet

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, Family) }
