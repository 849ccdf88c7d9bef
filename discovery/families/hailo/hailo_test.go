package hailo_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/hailo"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, hailo.Family) }
