package gaudi_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/gaudi"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, gaudi.Family) }
