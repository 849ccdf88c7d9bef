package driver

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool"
	"chandler.dev/driver/pool/pooltest"
)

// changing makes random changes of all that the published pool depends on.
type changing struct {
	*rand.Rand
	bench    *bench
	gone     atomic.Bool // the taint of vanished devices prevents scheduling
	snapshot *rules.Snapshot
	withheld map[string]string
	claims   map[string]*resourceapi.ResourceClaim
	names    int
}

// device returns a device in one of its forms, with one of its states, and false if it is missing.
func (c *changing) device(name string) (d rules.Offered, there bool) {
	switch c.IntN(6) {
	case 0:
		return d, false
	case 1:
		d = byNumber(name, 2+c.Int64N(3))
	case 2:
		d = byMemory(name, 8)
	default:
		d = gpu(name, 1)
	}
	switch c.IntN(6) {
	case 0:
		d.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionUnhealthy}
	case 1:
		d.Health = discovery.Health{Status: discovery.Unknown, Condition: discovery.ConditionUnknown}
	}
	return d, true
}

// offer changes the snapshot.
func (c *changing) offer() {
	var devices []rules.Offered
	for _, name := range []string{"a", "b", "c"} {
		if d, there := c.device(name); there {
			devices = append(devices, d)
		}
	}
	for _, name := range []string{"g-1", "g-2", "g-3"} {
		if c.IntN(4) > 0 {
			devices = append(devices, pooltest.PartDevice("g", name, 1+c.IntN(4)))
		}
	}
	c.snapshot = &rules.Snapshot{Devices: devices}
}

// withhold changes which physical devices are withheld.
func (c *changing) withhold() {
	c.withheld = make(map[string]string)
	for _, silicon := range []string{"a", "b", "c", "g"} {
		if c.IntN(3) == 0 {
			c.withheld[silicon] = "it moves"
		}
	}
}

// prepare prepares a claim for a device, or for a share of the device. The claim may be refused.
func (c *changing) prepare() {
	if len(c.snapshot.Devices) == 0 {
		return
	}
	c.names++
	d := c.snapshot.Devices[c.IntN(len(c.snapshot.Devices))]
	name := fmt.Sprint("claim-", c.names)
	allocated := claim(name, d.Name)
	if c.IntN(2) == 0 {
		allocated = taking(allocated, discovery.Shares, "1")
	}
	if c.IntN(3) == 0 {
		allocated = fromOtherPool(allocated)
	}
	if _, err := c.bench.try(allocated); err == nil {
		c.claims[name] = allocated
	}
}

func (c *changing) unprepare() error {
	if len(c.claims) == 0 {
		return nil
	}
	name := slices.Sorted(maps.Keys(c.claims))[c.IntN(len(c.claims))]
	defer delete(c.claims, name)
	return c.bench.tryUnprepare(c.claims[name])
}

// The published pool follows the devices, their states, the placement, the claims and the
// configuration, in any order and with any delay, while the kubelet restarts. The agent publishes
// the snapshot again at least every 30 seconds, so a claim may change the pool later, but its end
// changes the pool at once.
func TestPublishedFollows(t *testing.T) {
	for seed := range uint64(30) {
		synctest.Test(t, func(t *testing.T) {
			c := &changing{Rand: rand.New(rand.NewPCG(seed, 0)), bench: newBench(t), claims: make(map[string]*resourceapi.ResourceClaim)}
			b := c.bench
			if seed%3 == 1 {
				b.config.KubeClient = pooltest.ChangingServer(t, pooltest.WithoutCounters)
			}
			b.config.GoneEffect = func() resourceapi.DeviceTaintEffect {
				if c.gone.Load() {
					return resourceapi.DeviceTaintEffectNoSchedule
				}
				return resourceapi.DeviceTaintEffectNoExecute
			}
			helper := &pooltest.Helper{}
			stop := b.run(helper)
			c.bench.offers(gpu("a", 1), gpu("b", 1), gpu("c", 1), pooltest.PartDevice("g", "g-1", 1), pooltest.PartDevice("g", "g-2", 1), pooltest.PartDevice("g", "g-3", 1))
			c.snapshot = b.view.Load().snapshot
			synctest.Wait()
			for i := range 80 {
				change := []string{"devices", "placement", "prepare", "prepare", "unprepare", "restart of the kubelet", "taint"}[c.IntN(7)]
				switch change {
				case "devices":
					c.offer()
				case "placement":
					c.withhold()
				case "prepare":
					c.prepare()
				case "unprepare":
					if err := c.unprepare(); err != nil {
						t.Error(err)
					}
				case "restart of the kubelet":
					b.SetRegistration(Accepted)
				case "taint":
					c.gone.Store(!c.gone.Load())
				}
				if change != "unprepare" {
					b.Publish(c.snapshot, c.withheld)
				}
				time.Sleep(time.Duration(c.Int64N(int64(3 * time.Second))))
				synctest.Wait()
				published := helper.LastPools()
				in, _ := b.poolInput(time.Now())
				in.Last, in.Features = published, b.Publisher.KeptFeatures()
				if want, _ := pool.BuildPools(in); !equality.Semantic.DeepEqual(published, want) {
					t.Errorf("seed %d, change %d (%s): published is %q, want %q", seed, i, change, pooltest.SketchPools(published), pooltest.SketchPools(want))
					break
				}
			}
			if err := stop(); err != nil {
				t.Error(err)
			}
		})
	}
}
