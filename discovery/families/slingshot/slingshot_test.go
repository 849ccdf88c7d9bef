package slingshot_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/slingshot"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, slingshot.Family) }
