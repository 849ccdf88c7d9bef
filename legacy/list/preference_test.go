package list

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
	"chandler.dev/legacy/list/listtest"
)

func TestPrefer(t *testing.T) {
	// Two NUMA nodes of four devices, each with two PCIe roots. Devices 2 and 6 have a private
	// link.
	var pairs []rules.Offered
	for i := range 8 {
		fabric := ""
		if i == 2 || i == 6 {
			fabric = "hive"
		}
		pairs = append(pairs, at(listtest.GPU(fmt.Sprint(i)), int64(i/4), fmt.Sprint("pci", i/2), fabric))
	}
	var shares []rules.Offered
	for i := range 3 {
		d := at(listtest.GPU(fmt.Sprint(i)), int64(i/2), "", "")
		shares = append(shares, offer(d, "", fmt.Sprintf("%d::0", i), fmt.Sprintf("%d::1", i), fmt.Sprintf("%d::2", i)))
	}
	// A ring of six devices in one fabric, and two physical devices with two and three partitions,
	// all on one NUMA node.
	var ring, parts []rules.Offered
	for i := range 6 {
		d := at(listtest.GPU(fmt.Sprint(i)), 0, "", "ring")
		// With a third name, which does not exist, the names are too long for a string.
		d.SetNames("linkedTo", []string{fmt.Sprintf("gpu-%d", (i+1)%6), fmt.Sprintf("gpu-%d", (i+5)%6), strings.Repeat("x", 60)})
		ring = append(ring, d)
	}
	for i := range 5 {
		d := at(listtest.GPU(fmt.Sprint(i)), 0, "", "")
		d.PartOf = &discovery.Silicon{Name: fmt.Sprint("card-", i/3)}
		parts = append(parts, d)
	}
	tests := map[string]struct {
		devices            []rules.Offered
		available, include string
		size               int
		want               string
	}{
		"none":                           {pairs, "0 1", "", 0, ""},
		"private link first":             {pairs, "0 1 2 3 4 5 6 7", "", 2, "2 6"},
		"then the PCIe root":             {pairs, "0 2 3 5", "", 2, "2 3"},
		"then the NUMA node":             {pairs, "0 5 7", "", 2, "5 7"},
		"a whole node":                   {pairs, "0 1 3 4 5 6 7", "", 4, "4 5 6 7"},
		"the smaller set":                {pairs, "0 1 3 4 5", "", 2, "4 5"},
		"one that keeps neighbours":      {pairs, "0 1 3 5", "", 1, "5"},
		"near to what must be included":  {pairs, "0 1 3 4 5", "5", 2, "4 5"},
		"all that must be included":      {pairs, "0 1 2 3", "3 0", 2, "0 3"},
		"included and not available":     {pairs, "0 1", "7", 2, "0 7"},
		"all":                            {pairs, "5 0 3", "", 3, "0 3 5"},
		"IDs that are listed no more":    {pairs, "x y", "", 1, "x"},
		"beside a stranger":              {pairs, "0 1 3 5", "x", 2, "5 x"},
		"too many":                       {pairs, "0 1", "", 3, "preferred allocation of 3 devices: 2 are available, 0 must be included"},
		"fewer than must be included":    {pairs, "0 1", "0 1", 1, "preferred allocation of 1 devices: 2 are available, 2 must be included"},
		"share of the freest":            {shares, "0::0 1::1 1::2 2::0", "", 1, "1::1"},
		"shares of near ones":            {shares, "0::0 0::1 0::2 1::0 1::1 1::2 2::0 2::1 2::2", "", 2, "0::0 1::0"},
		"shares of all":                  {shares, "0::0 0::1 0::2 1::0 1::1 1::2 2::0 2::1 2::2", "", 3, "0::0 1::0 2::0"},
		"shares beside those included":   {shares, "0::0 0::1 1::0 1::1", "0::0", 2, "0::0 1::0"},
		"linked to each other":           {ring, "0 2 4 5", "", 2, "0 5"},
		"a stretch of the ring":          {ring, "0 1 3 4 5", "3", 3, "3 4 5"},
		"parts of one":                   {parts, "0 1 3 4", "0", 2, "0 1"},
		"parts of the emptier one":       {parts, "0 1 2 3 4", "", 2, "3 4"},
		"parts of the one that has all":  {parts, "0 1 2 3 4", "", 3, "0 1 2"},
		"shares of one, if there is one": {shares, "2::0 2::1 2::2", "", 2, "2::0 2::1"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			l := first(listtest.Resource, test.devices...)
			available := strings.Fields(test.available)
			for range 20 {
				rand.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
				ids, err := l.PreferIDs(available, strings.Fields(test.include), test.size)
				got := strings.Join(ids, " ")
				if err != nil {
					got = err.Error()
				}
				if got != test.want {
					t.Fatalf("got %q, want %q", got, test.want)
				}
			}
		})
	}
}

// allocatedBy returns the list of a resource with an allocation, or nil if no device offers the
// resource.
func allocatedBy(allocation rules.Allocation, resource string, devices ...rules.Offered) *List {
	s := listtest.Snapshot(devices...)
	s.Allocation = map[string]rules.Allocation{resource: allocation}
	lists, _ := Lists{}.Next(Input{Snapshot: s, View: ledger.ViewOf(StockOf(listtest.FoundDevices(devices), Lists{}))})
	return lists.Resources()[resource]
}

// The policies differ in the preferred devices, and in whether shares come from idle or busy
// devices.
func TestPolicies(t *testing.T) {
	// Two NUMA nodes of four devices, each with two PCIe roots.
	var devices, shares []rules.Offered
	for i := range 8 {
		devices = append(devices, at(listtest.GPU(fmt.Sprint(i)), int64(i/4), fmt.Sprint("pci", i/2), ""))
	}
	for i := range 3 {
		d := at(listtest.GPU(fmt.Sprint(i)), int64(i/2), "", "")
		shares = append(shares, offer(d, "", fmt.Sprintf("%d::0", i), fmt.Sprintf("%d::1", i), fmt.Sprintf("%d::2", i)))
	}
	amounts := []rules.Offered{listtest.InUnits("a", 8), listtest.InUnits("b", 4)}
	const all, some = "0 1 2 3 4 5 6 7", "0::0 1::0 1::1 2::0 2::1 2::2"
	for name, test := range map[string]struct {
		devices                 []rules.Offered
		available, include      string
		size                    int
		aligned, spread, packed string
	}{
		"two devices":       {devices, all, "", 2, "0 1", "0 4", "0 1"},
		"four devices":      {devices, all, "", 4, "0 1 2 3", "0 2 4 6", "0 1 2 3"},
		"beside one":        {devices, all, "5", 2, "4 5", "0 5", "4 5"},
		"one share":         {shares, some, "", 1, "2::0", "2::0", "0::0"},
		"three shares":      {shares, some, "", 3, "1::0 2::0 2::1", "1::0 2::0 2::1", "0::0 1::0 1::1"},
		"shares beside one": {shares, some, "2::1", 2, "1::0 2::1", "1::0 2::1", "0::0 2::1"},
		"an amount":         {amounts, strings.Join(append(listtest.UnitIDs("a", 0, 8), listtest.UnitIDs("b", 0, 4)...), " "), "", 2, "b-_-0 b-_-1", "a-_-0 a-_-1", "b-_-0 b-_-1"},
	} {
		t.Run(name, func(t *testing.T) {
			for policy, want := range map[rules.Policy]string{"": test.aligned, rules.PolicyAligned: test.aligned, rules.PolicySpread: test.spread, rules.PolicyPacked: test.packed} {
				for _, resource := range []string{listtest.Resource, listtest.MemoryResource} {
					l := allocatedBy(rules.Allocation{Policy: policy}, resource, test.devices...)
					if l == nil {
						continue
					}
					ids, err := l.PreferIDs(strings.Fields(test.available), strings.Fields(test.include), test.size)
					if got := strings.Join(ids, " "); err != nil || got != want {
						t.Errorf("%q: got %q, %v; want %q", policy, got, err, want)
					}
				}
			}
		})
	}
}

// The best set is found even without any device's nearest neighbour. Among equally near sets,
// PreferIDs takes the set that leaves near devices for others.
func TestPreferComparesSets(t *testing.T) {
	linked := func(id string, numa int64, to ...string) rules.Offered {
		d := at(listtest.GPU(id), numa, "", "")
		d.SetNames("linkedTo", to)
		return d
	}
	// A star of 0 with 1, 2 and 3, each a pair with 0, and a square of 6, 7, 8 and 9.
	star := []rules.Offered{
		linked("0", 0, "gpu-1", "gpu-2", "gpu-3"), linked("1", 0), linked("2", 0), linked("3", 0),
		linked("6", 1, "gpu-7", "gpu-8"), linked("7", 1, "gpu-9"), linked("8", 1, "gpu-9"), linked("9", 1),
	}
	for name, test := range map[string]struct {
		available string
		size      int
		want      string
	}{
		"the square has one link more":   {"0 1 2 3 6 7 8 9", 4, "6 7 8 9"},
		"a pair that no other pod needs": {"0 1 6 7 8 9", 2, "0 1"},
		"a side of the square":           {"0 1 2 3 7 9", 2, "7 9"},
		"one without near devices":       {"0 6 7 9", 1, "0"},
	} {
		t.Run(name, func(t *testing.T) {
			ids, err := first(listtest.Resource, star...).PreferIDs(strings.Fields(test.available), nil, test.size)
			if got := strings.Join(ids, " "); err != nil || got != test.want {
				t.Errorf("got %q, %v; want %q", got, err, test.want)
			}
		})
	}
}

// All sets of devices are compared if this is quick. Otherwise the answer still has the right size
// and includes the required IDs.
func TestPreferOfMany(t *testing.T) {
	var devices []rules.Offered
	var ids []string
	for i := range 64 {
		ids = append(ids, fmt.Sprint(i))
		devices = append(devices, at(listtest.GPU(fmt.Sprint(i)), int64(i/32), fmt.Sprint("pci", i/4), ""))
	}
	l := first(listtest.Resource, devices...)
	for _, include := range [][]string{nil, {"13"}, {"2", "40"}} {
		got, err := l.PreferIDs(ids, include, 8)
		if err != nil || len(got) != 8 || slices.ContainsFunc(include, func(id string) bool { return !slices.Contains(got, id) }) {
			t.Errorf("beside %q: %q, %v", include, got, err)
		}
	}
	if got, err := l.PreferIDs(ids, nil, 8); err != nil || !slices.Equal(got, ids[:8]) {
		t.Errorf("got %q, %v; want two whole roots", got, err)
	}
	runtime.LockOSThread() // for processorTime
	defer runtime.UnlockOSThread()
	for missing := range 4 {
		begin := processorTime(t)
		got, err := l.PreferIDs(ids, []string{"40"}, len(ids)-missing)
		if took := processorTime(t) - begin; err != nil || len(got) != len(ids)-missing || took > time.Second {
			t.Errorf("all but %d: %d in %s, %v", missing, len(got), took, err)
		}
	}
}

// processorTime returns how long the present thread has run. Unlike the time of the clock, it does
// not depend on the load of the machine.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var spent unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &spent); err != nil {
		t.Fatal(err)
	}
	return time.Duration(spent.Nano())
}

// If the configuration limits containers to one device, a container cannot get two.
func TestNoMoreThanOne(t *testing.T) {
	l := allocatedBy(rules.Allocation{One: true}, listtest.Resource, listtest.GPU("a"), listtest.GPU("b"))
	if units, err := l.LookUp([]string{"a"}); err != nil || len(units) != 1 {
		t.Errorf("one: %v, %v", units, err)
	}
	if _, err := l.LookUp([]string{"a", "b"}); err == nil || !strings.Contains(err.Error(), "2 requested") {
		t.Errorf("two: %v", err)
	}
}

// BenchmarkPrefer measures the largest number of sets for individual comparison, more devices than
// that, and the shares of eight devices.
func BenchmarkPrefer(b *testing.B) {
	wholes := func(n int) (devices []rules.Offered, ids []string) {
		for i := range n {
			id := fmt.Sprint(i)
			devices, ids = append(devices, at(listtest.GPU(id), int64(2*i/n), fmt.Sprint("pci", i/4), "")), append(ids, id)
		}
		return devices, ids
	}
	shares := func(n int) (devices []rules.Offered, ids []string) {
		for i := range 8 {
			var own []string
			for j := range n / 8 {
				own = append(own, fmt.Sprintf("%d::%d", i, j))
			}
			devices, ids = append(devices, offer(at(listtest.GPU(fmt.Sprint(i)), int64(i/4), fmt.Sprint("pci", i/2), ""), "", own...)), append(ids, own...)
		}
		return devices, ids
	}
	for _, test := range []struct {
		name    string
		of      func(n int) ([]rules.Offered, []string)
		n, size int
	}{
		{"devices", wholes, 16, 8}, {"devices", wholes, 64, 8}, {"devices", wholes, 64, 32}, {"devices", wholes, 64, 62}, {"devices", wholes, 160, 158}, {"devices", wholes, 256, 16},
		{"shares", shares, 1024, 1}, {"shares", shares, 1024, 8}, {"shares", shares, 1024, 512},
	} {
		devices, ids := test.of(test.n)
		l := first(listtest.Resource, devices...)
		b.Run(fmt.Sprintf("%d_of_%d_%s", test.size, test.n, test.name), func(b *testing.B) {
			for b.Loop() {
				if _, err := l.PreferIDs(ids, nil, test.size); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
