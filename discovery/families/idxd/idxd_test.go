package idxd_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/idxd"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, idxd.Family) }
