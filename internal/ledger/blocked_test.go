package ledger

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/stocktest"
)

const (
	dra     = discovery.ModeDRA
	classic = discovery.ModeDevicePlugin
)

// After two cards were removed and found again with each other's numbers, a container with a node
// has the other card, which no other owner may get. A shared node of all cards is not considered.
func TestNodesThatAnotherDeviceHasNow(t *testing.T) {
	before := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	b := newBench(t)
	b.mustGive(stocktest.Claim("c", before["a"]), before)
	now := stocktest.New(stocktest.NewGPU("a", 129), stocktest.NewGPU("b", 128))
	b.mustRefuse(stocktest.Claim("other", now["b"]), now, "claim default/c, which was given its nodes as those of device a")
	b.mustRefuse(stocktest.Claim("other", now["a"]), now, "device a is in use by claim default/c")
	alone := stocktest.NewGPU("b", 131)
	alone.Edits.DeviceNodes[1].Path = "/dev/dri/renderD128" // after a restart the container was given the path
	renamed := stocktest.New(stocktest.NewGPU("a", 130), alone)
	b.mustRefuse(stocktest.Claim("other", renamed["b"]), renamed, "given its nodes")
	numbers := stocktest.NewGPU("b", 128)
	numbers.Edits.DeviceNodes[1].Path = "/dev/dri/renderD200" // and the container may open the numbers
	renumbered := stocktest.New(stocktest.NewGPU("a", 130), numbers)
	b.mustRefuse(stocktest.Claim("other", renumbered["b"]), renumbered, "given its nodes")
	left := stocktest.New(stocktest.NewGPU("d", 130)) // the other card has only the shared node
	b.mustGive(stocktest.Claim("other", left["d"]), left)
}

// All shares of a device together take the device's part of its physical device.
func TestSharesOfAPart(t *testing.T) {
	p := stocktest.NewPart("card", "p0", 4)
	p.Capacity = discovery.Capacity{"shares": {Value: resource.MustParse("4")}}
	s := stocktest.New(p, stocktest.NewPart("card", "p1", 4))
	b := newBench(t)
	for _, name := range []string{"one", "two"} {
		c := stocktest.Claim(name, p)
		c.Results[0].Consumes = stocktest.Amount("shares", "1")
		b.mustGive(c, s)
	}
	b.mustGive(stocktest.Claim("rest", s["p1"]), s)
}
