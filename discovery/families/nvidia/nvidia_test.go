package nvidia_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/nvidia"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, nvidia.Family) }
