package sgx_test

import (
	"testing"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/sgx"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, sgx.Family) }
