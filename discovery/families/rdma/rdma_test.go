package rdma_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/rdma"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, rdma.Family) }
