package hypervisor_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/hypervisor"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, hypervisor.Family) }
