package neuron_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/neuron"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, neuron.Family) }
