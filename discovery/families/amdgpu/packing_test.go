package amdgpu_test

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/amdgpu"
	"chandler.dev/discovery/families/amdgpu/parttest"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/inuse"
)

var family = amdgpu.Family

// applied returns the devices of a host.
func applied(host *discovery.Host) *rules.Snapshot {
	return (&rules.Rules{}).ApplyTo(scan.ReadHost(host, []*discovery.Family{family}))
}

// dividing is a host whose GPUs may be partitioned, with the agent's records of partitioned GPUs.
type dividing struct {
	*parttest.Host

	ours map[string]discovery.Creation // by unit

	alone bool            // no process uses any device
	seen  *rules.Snapshot // cached for the state in when
	when  string
}

func newDividing(gpus int) *dividing {
	return &dividing{Host: parttest.New(gpus), ours: make(map[string]discovery.Creation)}
}

func (h *dividing) host() *discovery.Host {
	return &discovery.Host{
		FS:            h.Host,
		Partitionings: []discovery.Selection[struct{}]{{Selects: func(discovery.Device) (bool, error) { return true, nil }}},
		CreatedUnit: func(unit string) (map[string]string, bool) {
			m, made := h.ours[unit]
			return m.How, made
		},
	}
}

func (h *dividing) tools() discovery.Tools {
	return discovery.Tools{Write: h.Write, CheckBusy: func(_ bool, functions ...sysfs.Device) error {
		if h.alone {
			return nil
		}
		return inuse.CheckFree(inuse.HostFinder{Host: h.host()}, inuse.Options{}, true, functions...)
	}}
}

// makes creates a device, as an agent does for a consumer.
func (h *dividing) makes(t *testing.T, m discovery.Creation) error {
	t.Helper()
	work, err := family.Create(h.host(), h.tools(), m)
	if work == nil || err != nil {
		return err
	}
	h.ours[m.Unit] = m
	return work(t.Context())
}

// unmakes removes a unit without consumers, as an agent does.
func (h *dividing) unmakes(t *testing.T, unit string) error {
	t.Helper()
	work, err := family.Remove(h.host(), h.tools(), h.ours[unit])
	if work != nil && err == nil {
		err = work(t.Context())
	}
	if err == nil {
		delete(h.ours, unit)
	}
	return err
}

// scan returns the devices and reports every problem as a test error.
func (h *dividing) scan(t *testing.T) *rules.Snapshot {
	t.Helper()
	if now := fmt.Sprint(h.Mode(0), h.Mode(h.Len()-1), slices.Sorted(maps.Keys(h.ours))); now != h.when || h.seen == nil {
		h.seen, h.when = applied(h.host()), now
	}
	for _, problem := range h.seen.Problems {
		t.Errorf("problem: %v", problem)
	}
	return h.seen
}

// sketch lists the devices, with "?" behind those that do not exist.
func sketch(s *rules.Snapshot) string {
	var all []string
	for _, d := range s.Devices {
		name := strings.TrimPrefix(strings.TrimPrefix(d.Name, parttest.Device), "-")
		if d.Creation != nil {
			name += "?"
		}
		if d.Health.Status != discovery.Healthy {
			name += "!"
		}
		all = append(all, name)
	}
	return strings.Join(all, " ")
}

var sequences = flag.Int("sequences", 100, "how many random sequences of claims TestPacking makes; see make simulate")

// For random claims, modes that remain after their claims, and modes that an administrator sets
// manually: the Kubernetes scheduler never allocates a GPU together with its partitions, nor
// partitions of two modes. All allocated devices can be created, no mode changes while a partition
// is allocated, and all GPUs are whole in the end.
func TestPacking(t *testing.T) {
	allocated := 0
	for seed := range *sequences {
		allocated += pack(t, rand.New(rand.NewPCG(uint64(seed), 17)))
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	t.Logf("%d claims", allocated)
}

// modeIn returns the mode in the name of a device, "spx" for a whole GPU.
func modeIn(device string) string {
	for mode := range parttest.Modes {
		if strings.Contains(device, "-"+strings.ToLower(mode)+"-") {
			return strings.ToLower(mode)
		}
	}
	return "spx"
}

func pack(t *testing.T, random *rand.Rand) (allocated int) {
	h := newDividing(1 + random.IntN(2))
	h.alone, h.Backwards = true, random.IntN(2) == 0
	empty := sketch(h.scan(t))
	held := make(map[types.UID]*rules.Offered)
	refused := false
	h.Refuse = func(device, mode string) error {
		for _, d := range held {
			if d.PartOf.Name == device && modeIn(d.Name) != strings.ToLower(mode) {
				t.Errorf("%s becomes %s while %s is allocated", device, mode, d.Name)
			}
		}
		if refused = random.IntN(6) == 0; refused {
			return syscall.EBUSY
		}
		return nil
	}
	s := pooltest.NewScheduler(t, features.All())
	for step := range 8 {
		made, problems := pool.BuildPools(pool.Input{Node: "node", Snapshot: h.scan(t), Features: features.All()})
		if len(problems) > 0 {
			t.Fatal(problems)
		}
		s.Publish(made)
		for i := range 1 + random.IntN(4) { // before the next scan
			wanted := []string{"spx", "dpx", "qpx", "cpx", "cpx"}[random.IntN(5)] + "_nps1"
			uid := types.UID(fmt.Sprint(step, "-", i))
			claim, ok := s.AllocateDevice(uid, resourceapi.ExactDeviceRequest{Selectors: []resourceapi.DeviceSelector{{
				CEL: &resourceapi.CELDeviceSelector{Expression: fmt.Sprintf(`device.attributes["chandler.dev"].profile == %q`, wanted)},
			}}})
			if !ok {
				continue
			}
			allocated++
			name := claim.Status.Allocation.Devices.Results[0].Device
			now := h.scan(t)
			at := slices.IndexFunc(now.Devices, func(d rules.Offered) bool { return d.Name == name })
			for _, other := range held {
				if at >= 0 && other.PartOf.Name == now.Devices[at].PartOf.Name && modeIn(other.Name) != modeIn(name) {
					t.Errorf("%s is given, and %s is taken", name, other.Name)
				}
			}
			if at < 0 {
				t.Errorf("%s is allocated, and is not there", name)
				continue
			}
			held[uid] = &now.Devices[at]
			if making := now.Devices[at].Creation; making != nil {
				refused = false
				if err := h.makes(t, *making); err != nil && !refused {
					t.Errorf("%s is allocated, and cannot be made: %v", name, err)
				}
			}
		}
		for _, uid := range slices.Sorted(maps.Keys(s.Claims)) {
			if random.IntN(3) == 0 {
				delete(s.Claims, uid)
				delete(held, uid)
			}
		}
		for _, unit := range slices.Sorted(maps.Keys(h.ours)) {
			taken := slices.ContainsFunc(slices.Collect(maps.Values(held)), func(d *rules.Offered) bool { return d.PartOf.Name == unit })
			if !taken && random.IntN(4) == 0 {
				refused = false
				if err := h.unmakes(t, unit); err != nil && !refused {
					t.Error(err)
				}
			}
		}
	}
	clear(held)
	h.Refuse = nil
	for unit := range h.ours {
		if err := h.unmakes(t, unit); err != nil {
			t.Error(err)
		}
	}
	if left := sketch(h.scan(t)); left != empty {
		t.Errorf("left are %s, want %s", left, empty)
	}
	return allocated
}
