package furiosa_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/furiosa"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, furiosa.Family) }
