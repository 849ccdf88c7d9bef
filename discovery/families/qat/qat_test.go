package qat_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/qat"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, qat.Family) }
