package driver

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool/pooltest"
)

const gib = 1 << 30

// byMemory returns a GPU with the given memory in GiB, shared in units of 1 GiB.
func byMemory(name string, memory int64) rules.Offered {
	d := gpu(name, 1)
	d.Capacity = discovery.Capacity{}
	d.Capacity.Set("memory", memory*gib)
	d.Capacity.Set("cores", 100)
	d.Sharing = &rules.Sharing{Capacity: "memory", Unit: resource.MustParse("1Gi"), Default: resource.MustParse(fmt.Sprint(memory, "Gi"))}
	return d
}

// byNumber returns a GPU for the given number of claims.
func byNumber(name string, shares int64) rules.Offered {
	d := gpu(name, 1)
	d.Capacity = discovery.Capacity{}
	d.Capacity.Set(discovery.Shares, shares)
	d.Sharing = &rules.Sharing{Capacity: discovery.Shares, Unit: resource.MustParse("1"), Default: resource.MustParse("1")}
	return d
}

// taking turns the claim's results into shares that consume an amount of a capacity.
func taking(c *resourceapi.ResourceClaim, capacity resourceapi.QualifiedName, amount string) *resourceapi.ResourceClaim {
	for i := range c.Status.Allocation.Devices.Results {
		r := &c.Status.Allocation.Devices.Results[i]
		r.ShareID = new(types.UID(fmt.Sprintf("00000000-0000-0000-0000-%012d", i)))
		r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{capacity: resource.MustParse(amount)}
	}
	return c
}

func TestSharedMemoryAddsUp(t *testing.T) {
	b := newBench(t).restart().offers(byMemory("a", 8))
	mustPrepare(t, b, taking(claim("one", "a"), "memory", "3Gi"))
	mustPrepare(t, b, taking(claim("two", "a"), "memory", "4Gi"))
	mustRefuse(t, b, taking(claim("three", "a"), "memory", "2Gi"), "is in use by", "more of its memory than there is")
	mustPrepare(t, b, taking(claim("four", "a"), "memory", "1Gi"))
	mustRefuse(t, b, claim("whole", "a"), "is in use by")
	// The shares are read again after a restart.
	b.restart().offers(byMemory("a", 8))
	mustRefuse(t, b, taking(claim("three", "a"), "memory", "2Gi"), "more of its memory than there is")
	if err := b.tryUnprepare(claim("two")); err != nil {
		t.Fatal(err)
	}
	mustPrepare(t, b, taking(claim("three", "a"), "memory", "2Gi"))
}

func TestSharesOfOneClaimAddUp(t *testing.T) {
	b := newBench(t).restart().offers(byMemory("a", 8))
	mustPrepare(t, b, taking(claim("one", "a"), "memory", "3Gi"))
	two := taking(claim("two", "a", "a"), "memory", "3Gi")
	mustRefuse(t, b, two, "more of its memory than there is")
}

// Another share of the same device is another allocation.
func TestShareAllocatedAgain(t *testing.T) {
	b := newBench(t).restart().offers(byMemory("a", 8))
	c := taking(claim("c", "a"), "memory", "8Gi")
	before := mustPrepare(t, b, c)[0].CDIDeviceIDs[0]
	c = taking(claim("c", "a"), "memory", "1Gi")
	c.Status.Allocation.Devices.Results[0].ShareID = new(types.UID("00000000-0000-0000-0000-999999999999"))
	now := mustPrepare(t, b, c)[0].CDIDeviceIDs[0]
	if spec := b.specOf(c); now == before || len(spec) != 1 || spec[now].DeviceNodes == nil {
		t.Errorf("answered is %s after %s, and in the spec there is %v", now, before, spec)
	}
	mustPrepare(t, b, taking(claim("other", "a"), "memory", "7Gi"))
}

func TestWholeExcludesShares(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1))
	mustPrepare(t, b, claim("whole", "a"))
	b.offers(byMemory("a", 8)) // the administrator has enabled sharing
	mustRefuse(t, b, taking(claim("share", "a"), "memory", "1Gi"), "is in use by", "whole")
}

// Several shares of a partition consume its counters once. A shared partition blocks other
// partitions like any partition.
func TestSharedPart(t *testing.T) {
	shared := func(name string, takes int) rules.Offered {
		d := pooltest.PartDevice("silicon", name, takes)
		d.Capacity = discovery.Capacity{}
		d.Capacity.Set(discovery.Shares, 4)
		d.Sharing = &rules.Sharing{Capacity: discovery.Shares, Unit: resource.MustParse("1"), Default: resource.MustParse("1")}
		return d
	}
	most := pooltest.PartDevice("silicon", "x", 1).PartOf.Counters["slices"]
	n := int(most.Value())
	b := newBench(t).restart().offers(shared("x", n), shared("y", 1))
	mustPrepare(t, b, taking(claim("one", "x"), discovery.Shares, "1"))
	mustPrepare(t, b, taking(claim("two", "x"), discovery.Shares, "1"))
	mustRefuse(t, b, taking(claim("three", "y"), discovery.Shares, "1"), "more of counter")

	b = newBench(t).restart().offers(shared("x", n/2), shared("y", n-n/2))
	mustPrepare(t, b, taking(claim("one", "x"), discovery.Shares, "1"))
	mustPrepare(t, b, taking(claim("two", "x"), discovery.Shares, "1"))
	mustPrepare(t, b, taking(claim("three", "y"), discovery.Shares, "1"))
}

func TestNumberedShares(t *testing.T) {
	b := newBench(t).restart().offers(byNumber("a", 2))
	mustPrepare(t, b, claim("one", "a-share-00"))
	mustPrepare(t, b, claim("two", "a-share-01"))
	mustRefuse(t, b, claim("three", "a-share-02"), "more of its shares than there is")
	mustRefuse(t, b, claim("whole", "a"), "is in use by")
}

// A container gets its amount of each device, and so does the family.
func TestConsumedReachesContainerAndFamily(t *testing.T) {
	b := newBench(t)
	granted := make(map[string]discovery.Consumed) // by request
	b.config.Granter = func(_ []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
		granted[grant.Request] = grant.Consumed
		return specs.ContainerEdits{}
	}
	b.restart().offers(byMemory("a", 8), byMemory("b", 16), gpu("c", 3), byNumber("d", 4))
	c := taking(claim("c", "a", "a", "b", "c", "d"), "memory", "2Gi")
	results := c.Status.Allocation.Devices.Results
	results[2].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("4Gi"), "cores": resource.MustParse("0")}
	results[3].ShareID, results[3].ConsumedCapacity = nil, nil
	results[4].Request = "other"
	results[4].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{discovery.Shares: resource.MustParse("1")}
	mustPrepare(t, b, c)
	spec := b.specOf(c)
	want := []string{
		"CHANDLER_DEVICES=a,a,b,c", "CHANDLER_MEMORY=2147483648,2147483648,4294967296,",
		"CHANDLER_DEVICES_C_R=a,a,b,c", "CHANDLER_MEMORY_C_R=2147483648,2147483648,4294967296,",
	}
	var requests [][]string
	for _, edits := range spec {
		if !slices.ContainsFunc(requests, func(env []string) bool { return slices.Equal(env, edits.Env) }) {
			requests = append(requests, edits.Env)
		}
	}
	slices.SortFunc(requests, slices.Compare)
	if diff := cmp.Diff([][]string{want, {"CHANDLER_DEVICES=d", "CHANDLER_SHARES=1", "CHANDLER_DEVICES_C_OTHER=d", "CHANDLER_SHARES_C_OTHER=1"}}, requests); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	memory, cores := granted["r"]["a"]["memory"], granted["r"]["b"]["cores"]
	if _, whole := granted["r"]["c"]; whole || memory.Cmp(resource.MustParse("4Gi")) != 0 || !cores.IsZero() || len(granted["other"]) != 1 {
		t.Errorf("the family is told %v", granted)
	}
}

// A negative amount is refused, since it would release the capacity of other claims.
func TestNegativeShare(t *testing.T) {
	b := newBench(t).restart().offers(byMemory("big", 8))
	if _, err := b.try(taking(claim("c", "big"), "memory", "-3Gi")); err == nil || !strings.Contains(err.Error(), "-3Gi of its memory") {
		t.Errorf("error %v", err)
	}
}

// After a change of sharing, an allocated device is published again when its claim has ended.
func TestSharedAgainIsPublishedAfterTheClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, helper := newBench(t), &pooltest.Helper{}
		stop := b.run(helper)
		b.offers(gpu("a", 1))
		pooltest.ExpectPublished(t, helper, "a")
		c := claim("c", "a")
		mustPrepare(t, b, c)
		b.offers(byMemory("a", 8))
		pooltest.ExpectPublished(t, helper, "")
		mustUnprepare(t, b, c)
		pooltest.ExpectPublished(t, helper, "a*")
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}

// Shares of two capacities exclude each other: a claim with all of a device's memory has the device
// exclusively, even after the device is shared by number.
func TestClaimsOfTwoForms(t *testing.T) {
	b := newBench(t).restart().offers(byMemory("a", 8))
	mustPrepare(t, b, taking(claim("one", "a"), "memory", "8Gi"))
	b.restart().offers(byNumber("a", 4))
	mustRefuse(t, b, taking(claim("two", "a"), discovery.Shares, "1"), "in use by")
	mustRefuse(t, b, claim("three", "a-share-00"), "in use by")
}

// Shares of two numbers cannot be allocated together, whether or not the agent was restarted in
// between. A claim that was allocated before the number changed has one of the earlier shares.
func TestNumberOfSharesChanges(t *testing.T) {
	for name, claims := range map[string]func(i int) *resourceapi.ResourceClaim{
		"shares": func(i int) *resourceapi.ResourceClaim {
			return taking(claim(fmt.Sprint(i), "a"), discovery.Shares, "1")
		},
		"numbered shares": func(i int) *resourceapi.ResourceClaim { return claim(fmt.Sprint(i), rules.ShareName("a", i, 8)) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t).restart().offers(byNumber("a", 4))
			for i := range 3 {
				mustPrepare(t, b, claims(i))
			}
			b.restart().offers(byNumber("a", 8))
			mustPrepare(t, b, claims(3))
			mustRefuse(t, b, claims(4), "more of its shares than there is")
			mustPrepare(t, b, claims(0))
			for i := range 4 {
				mustUnprepare(t, b, claims(i))
			}
			for i := range 8 {
				mustPrepare(t, b, claims(i))
			}
			b.restart().offers(byNumber("a", 2))
			mustRefuse(t, b, claims(9), "more of its shares than there is")
		})
	}
}

// A device is not published while a claim has a share of another number.
func TestNumberOfSharesIsPublishedAfterTheClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t).restart().offers(byNumber("a", 4))
		c := taking(claim("c", "a"), discovery.Shares, "1")
		mustPrepare(t, b, c)
		helper := &pooltest.Helper{}
		stop := b.run(helper)
		b.offers(byNumber("a", 8))
		pooltest.ExpectPublished(t, helper, "")
		b.offers(byNumber("a", 4))
		pooltest.ExpectPublished(t, helper, "a*")
		b.offers(byNumber("a", 8))
		pooltest.ExpectPublished(t, helper, "")
		mustUnprepare(t, b, c)
		pooltest.ExpectPublished(t, helper, "a*")
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}

// A new agent no longer shares a device, and the scheduler allocates a share before it sees the new
// slices. The claim gets the device, and the slices omit the device until the claim ends, also
// after the kubelet has restarted.
func TestShareFromEarlierSlices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, helper := newBench(t), &pooltest.Helper{}
		stop := b.run(helper)
		b.offers(gpu("a", 1), gpu("b", 2))
		pooltest.ExpectPublished(t, helper, "a b")
		c := taking(claim("c", "a"), discovery.Shares, "1")
		mustPrepare(t, b, c)
		b.SetRegistration(Accepted)
		pooltest.ExpectPublished(t, helper, "b")
		mustUnprepare(t, b, c)
		pooltest.ExpectPublished(t, helper, "a b")
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}
