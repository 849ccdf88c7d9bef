package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/families/nvidia/migtest"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/driver/pool"
	"chandler.dev/internal/hostservice"
	"chandler.dev/internal/hostservice/wire"
)

// migNode is a node with an H100 in MIG mode. The configuration allows on-demand instances, and
// released instances remain for a minute.
type migNode struct {
	*node
	*migtest.GPU

	boot string
}

func newMIGNode(t *testing.T) *migNode {
	return &migNode{newNode(t), &migtest.GPU{Profiles: migtest.Layouts["H100"]}, "first"}
}

func (c *migNode) config() Config {
	config := c.node.config(&rules.Rules{Mode: discovery.ModeDRA})
	config.FS, config.Families, config.BootID = c.GPU, []*discovery.Family{nvidia.Family}, c.boot
	config.Programs = map[string]func(context.Context, discovery.PartitionChange) ([]byte, error){"nvidia": c.ChangePartition}
	config.Settings.IdleTime = time.Minute
	config.Settings.Partition = []discovery.Selection[struct{}]{{Expression: "all", Selects: func(discovery.Device) (bool, error) { return true, nil }}}
	return config
}

// start runs an agent, and waits until the devices are published.
func (c *migNode) start() (stop func()) {
	c.t.Helper()
	stop = c.run(c.config())
	c.pause(time.Minute)
	return stop
}

func (c *migNode) pause(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// gets prepares a claim for a device of the GPU, such as "mig-1g-10gb-at-0".
func (c *migNode) gets(device, name string) (*resourceapi.ResourceClaim, error) {
	c.t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)}}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Request: "r", Driver: discovery.Domain, Pool: "node", Device: migtest.Device + "-" + device}},
	}}
	if _, err := c.client.ResourceV1().ResourceClaims("default").Create(c.t.Context(), claim, metav1.CreateOptions{}); err != nil {
		c.t.Fatal(err)
	}
	return claim, c.prepareAgain(claim)
}

// got prepares a claim, which must succeed, and returns a function that unprepares the claim.
func (c *migNode) got(device, name string) (release func()) {
	c.t.Helper()
	claim, err := c.gets(device, name)
	if err != nil {
		c.t.Errorf("claim %s: %v", name, err)
	}
	return func() { c.unprepare(claim) }
}

// is checks the instances of the GPU, and the number of their records.
func (c *migNode) is(places ...string) {
	c.t.Helper()
	synctest.Wait()
	if got := c.Instances(); !slices.Equal(got, places) {
		c.t.Errorf("instances %q, want %q", got, places)
	}
	records, _ := filepath.Glob(filepath.Join(c.dir, "run/chandler/journal/create/*"))
	if len(records) != len(places) {
		c.t.Errorf("written down %q, want as many as %q", records, places)
	}
}

// offered reports whether slices contain a device.
func (c *migNode) offered(device string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Contains(c.published, migtest.Device+"-"+device)
}

// partitionService is the transport to a host service that changes partitions with the program of a
// GPU.
type partitionService struct {
	change  func(context.Context, discovery.PartitionChange) ([]byte, error)
	changes []wire.PartitionChange
}

// RoundTrip implements [http.RoundTripper].
func (s *partitionService) RoundTrip(r *http.Request) (*http.Response, error) {
	recorder := httptest.NewRecorder()
	if r.Method != http.MethodPut {
		err := json.NewEncoder(recorder).Encode(wire.Service{Oldest: wire.OldestVersion, Newest: wire.NewestVersion})
		return recorder.Result(), err
	}
	var c wire.PartitionChange
	if err := json.NewDecoder(r.Body).Decode(&c); err != nil {
		return nil, err
	}
	s.changes = append(s.changes, c)
	output, err := s.change(r.Context(), discovery.PartitionChange{Function: c.Function, Place: c.Place, Remove: c.Remove, UUID: c.UUID})
	err = errors.Join(err, json.NewEncoder(recorder).Encode(wire.Output{Text: string(output)}))
	return recorder.Result(), err
}

// With a host service, the agent creates and removes an instance by requests that name its lease on
// the GPU's function.
func TestAgentCreatesMIGPartitionsByHostService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMIGNode(t)
		service := &partitionService{change: c.ChangePartition}
		client := hostservice.NewClient("/run", service)
		config := c.config()
		config.HostService, config.Write = client, nil
		config.Programs["nvidia"] = func(ctx context.Context, change discovery.PartitionChange) ([]byte, error) {
			output, _, err := client.ChangePartition(ctx, facts.Program, change)
			return output, err
		}
		stop := c.run(config)
		c.pause(time.Minute)
		release := c.got("mig-2g-20gb-at-2", "first")
		c.is("2g.20gb@2")
		release()
		c.pause(2 * time.Minute)
		c.is()
		stop()
		var places []string
		for _, change := range service.changes {
			places = append(places, fmt.Sprint(change.Place, " ", change.Remove))
			if change.Lease != "unit "+migtest.Device+"-mig-2g-20gb-at-2" || change.Function != migtest.Address || change.Program != facts.Program || change.Session == "" {
				t.Errorf("change %+v", change)
			}
		}
		if want := []string{"2g.20gb@2 false", "2g.20gb@2 true"}; !slices.Equal(places, want) {
			t.Errorf("changes %q, want %q", places, want)
		}
	})
}

// An instance is created for a claim, whose CDI spec has the device nodes, and removed a while
// after its release. Until then another claim gets the instance unchanged.
func TestAgentCreatesMIGPartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMIGNode(t)
		stop := c.start()
		c.is()
		if len(c.published) != 25 {
			t.Errorf("slices have %q", c.published)
		}
		release := c.got("mig-2g-20gb-at-2", "first")
		c.is("2g.20gb@2")
		specs, _ := filepath.Glob(filepath.Join(c.dir, "cdi/*first*"))
		if len(specs) != 1 {
			t.Fatalf("specs %q", specs)
		}
		spec, err := os.ReadFile(specs[0])
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{`"/dev/nvidia0"`, `"/dev/nvidia-caps/nvidia-cap10"`, `"/dev/nvidia-caps/nvidia-cap11"`, "NVIDIA_VISIBLE_DEVICES=MIG-"} {
			if !strings.Contains(string(spec), want) {
				t.Errorf("the spec has no %s:\n%s", want, spec)
			}
		}
		c.pause(time.Hour)
		if !c.offered("mig-2g-20gb-at-2") || !c.offered("mig-7g-80gb-at-0") || len(c.published) != 25 {
			t.Errorf("slices have %q", c.published)
		}
		release()
		c.pause(30 * time.Second)
		again := c.got("mig-2g-20gb-at-2", "again")
		c.pause(time.Hour)
		again()
		c.pause(2 * time.Minute)
		c.is()
		if got, want := strings.Join(c.Calls(), " "), "create=2g.20gb@2 remove=2g.20gb@2"; got != want {
			t.Errorf("called with %q, want %q", got, want)
		}
		stop()
	})
}

// A claim may get an instance in place of overlapping instances that are released but not yet
// removed. An instance that is allocated, or was created by an administrator, is an obstacle.
func TestAgentReplacesIdleMIGPartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMIGNode(t)
		stop := c.start()
		one, two := c.got("mig-1g-10gb-at-0", "one"), c.got("mig-1g-10gb-at-1", "two")
		one()
		if _, err := c.gets("mig-2g-20gb-at-0", "early"); err == nil || !strings.Contains(err.Error(), "two") {
			t.Errorf("given what another claim has a part of: %v", err)
		}
		two()
		release := c.got("mig-2g-20gb-at-0", "both")
		if got := c.Instances(); !slices.Equal(got, []string{"2g.20gb@0"}) {
			t.Errorf("instances %q", got)
		}
		c.pause(2 * time.Minute)
		if got := c.Instances(); !slices.Equal(got, []string{"2g.20gb@0"}) {
			t.Errorf("instances %q, after it was time to remove the others", got)
		}
		release()
		c.pause(2 * time.Minute)
		c.is()
		stop()
	})
}

// An instance of an administrator is offered, other instances at its placement are not, and the
// agent never removes the instance.
func TestAgentKeepsMIGPartitionsCreatedByHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMIGNode(t)
		if err := c.CreateInstance("3g.40gb@4"); err != nil {
			t.Fatal(err)
		}
		stop := c.start()
		if !c.offered("mig-3g-40gb-at-4") || c.offered("mig-1g-10gb-at-5") || !c.offered("mig-4g-40gb-at-0") {
			t.Errorf("slices have %q", c.published)
		}
		release := c.got("mig-3g-40gb-at-4", "first")
		release()
		c.pause(time.Hour)
		if got := c.Instances(); !slices.Equal(got, []string{"3g.40gb@4"}) || len(c.Calls()) > 0 {
			t.Errorf("instances %q", got)
		}
		stop()
	})
}

// The agent keeps an instance that an administrator creates at the same moment as the agent, and an
// instance that an administrator creates after removing the agent's instance.
func TestAgentKeepsMIGPartitionsCreatedByHandMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMIGNode(t)
		c.Refuse = func(arg string) error {
			if arg == "--create=1g.10gb@0" {
				return c.CreateInstance("1g.10gb@0")
			}
			return nil
		}
		stop := c.start()
		first, second := c.got("mig-1g-10gb-at-0", "first"), c.got("mig-2g-20gb-at-4", "second")
		first()
		second()
		c.pause(time.Second)
		c.Remove("2g.20gb@4")
		if err := c.CreateInstance("2g.20gb@4"); err != nil {
			t.Fatal(err)
		}
		c.pause(time.Hour)
		if got := c.Instances(); !slices.Equal(got, []string{"1g.10gb@0", "2g.20gb@4"}) {
			t.Errorf("instances %q", got)
		}
		if records, _ := filepath.Glob(filepath.Join(c.dir, "run/chandler/journal/create/*")); len(records) > 0 {
			t.Errorf("written down %q", records)
		}
		stop()
	})
}

// Without NVML the agent cannot remove its instances, but notices when an administrator removes
// them.
func TestAgentWithMIGPartitionsWithoutNVML(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMIGNode(t)
		stop := c.start()
		c.got("mig-1g-10gb-at-0", "first")()
		stop()
		c.Silent = true
		c.Remove("nothing") // refreshes the files
		config := c.config()
		config.Programs = nil
		stop = c.run(config)
		c.pause(time.Hour)
		c.is("1g.10gb@0")
		c.Remove("1g.10gb@0")
		c.pause(time.Minute)
		c.is()
		stop()
	})
}

// An agent takes over the instances of its predecessor: allocated instances remain, and the others
// are removed. After a reboot no instance exists.
func TestAgentAdoptsMIGPartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMIGNode(t)
		stop := c.start()
		_, second := c.got("mig-1g-10gb-at-0", "first"), c.got("mig-1g-10gb-at-1", "second")
		second()
		stop()
		stop = c.start()
		c.pause(2 * time.Minute)
		c.is("1g.10gb@0")
		stop()
		c.Remove("1g.10gb@0") // as a reboot does
		c.boot = "second"
		stop = c.start()
		c.pause(2 * time.Minute)
		c.is()
		if !c.offered("mig-1g-10gb-at-0") {
			t.Errorf("slices have %q", c.published)
		}
		stop()
	})
}

// An allocated instance keeps its name, and is not treated as gone, after a configuration change
// that forbids on-demand instances. The agent removes the instance after its release.
func TestAgentCreatesNoMoreMIGPartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMIGNode(t)
		stop := c.start()
		release := c.got("mig-1g-10gb-at-0", "first")
		stop()
		config := c.config()
		config.Settings.Partition = nil
		stop = c.run(config)
		c.pause(time.Hour)
		c.is("1g.10gb@0")
		if want := []string{migtest.Device + "-mig-1g-10gb-at-0"}; !slices.Equal(c.published, want) {
			t.Errorf("slices have %q, want %q", c.published, want)
		}
		if taint := (&rebinding{node: c.node}).taint(); taint != "" {
			t.Errorf("taints %q", taint)
		}
		release()
		c.pause(2 * time.Minute)
		c.is()
		stop()
	})
}

// After a failure to create an instance, a later call can create the instance. An instance that
// cannot be removed, because a process uses it, is removed later.
func TestAgentCannotCreateMIGPartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMIGNode(t)
		var refuse atomic.Value
		refuse.Store("--create")
		c.Refuse = func(arg string) error {
			if refuse := refuse.Load().(string); refuse != "" && strings.HasPrefix(arg, refuse) {
				return errors.New("in use (19)")
			}
			return nil
		}
		stop := c.start()
		claim, err := c.gets("mig-1g-10gb-at-0", "first")
		if err == nil || !strings.Contains(err.Error(), "in use (19)") {
			t.Errorf("error %v", err)
		}
		refuse.Store("--remove")
		if err := c.prepareAgain(claim); err != nil {
			t.Errorf("the next call: %v", err)
		}
		c.unprepare(claim)
		c.pause(3 * time.Minute)
		c.is("1g.10gb@0")
		refuse.Store("")
		c.pause(time.Minute)
		c.is()
		stop()
	})
}

// If a GPU is unhealthy, so is every instance that could be created on the GPU.
func TestAgentCreatesNoMIGPartitionsOnAnUnhealthyGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMIGNode(t)
		stop := c.start()
		c.Fail(facts.XID{Code: 79, Time: time.Now().UTC().Truncate(time.Second)})
		c.pause(5 * time.Minute)
		sick := 0
		c.mu.Lock()
		for _, slice := range pool.SlicesOf(c.pools) {
			for _, d := range slice.Devices {
				if len(d.Taints) > 0 {
					sick++
				}
			}
		}
		c.mu.Unlock()
		if sick != 25 {
			t.Errorf("%d devices are sick", sick)
		}
		stop()
	})
}

// byProfile returns an entry of resources for all placements of a profile.
func byProfile(t *testing.T, profile, name string) rules.Resource {
	t.Helper()
	return rules.Resource{Selector: rulestest.CompileSelector(t, `device.attributes["chandler.dev"].?profile.orValue("") == "`+profile+`"`), Name: name}
}

// classic returns settings with entries of resources for the device plugin API.
func (c *migNode) classic(entries ...rules.Resource) Settings {
	settings := c.config().Settings
	settings.Rules = &rules.Rules{Mode: discovery.ModeDevicePlugin, Resources: entries}
	return settings
}

// healthyOf returns the healthy IDs of a resource, in order.
func (c *migNode) healthyOf(resource string) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(slices.Values(c.healthy[resource]))
}

// For an entry of resources the agent creates as many of the selected instances as fit, and keeps
// them. After the entry is removed, the agent removes the instances that are not allocated.
func TestAgentCreatesMIGPartitionsForAResource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMIGNode(t)
		config := c.config()
		// Four 1g.20gb take all memory slices, and leave no room for the others.
		config.Settings = c.classic(byProfile(t, "3g.40gb", "example.com/large"), byProfile(t, "1g.20gb", "nvidia.com/mig-1g.20gb"))
		stop := c.run(config)
		c.pause(5 * time.Minute)
		places := []string{"1g.20gb@0", "1g.20gb@2", "1g.20gb@4", "1g.20gb@6"}
		c.is(places...)
		var ids []string
		for _, at := range []string{"0", "2", "4", "6"} {
			ids = append(ids, migtest.Device+"-mig-1g-20gb-at-"+at)
		}
		if got := c.healthyOf("nvidia.com/mig-1g.20gb"); !slices.Equal(got, ids) {
			t.Errorf("healthy: %q", got)
		}
		if got := c.healthyOf("example.com/large"); len(got) > 0 {
			t.Errorf("healthy: %q", got)
		}
		c.allocate("nvidia.com/mig-1g.20gb", ids[1], "/dev/nvidia0")
		c.Calls()
		c.pause(time.Hour)
		if calls := c.Calls(); len(calls) > 0 {
			t.Errorf("nothing changes, and it is called with %q", calls)
		}
		c.is(places...)
		c.changes <- Change{Settings: c.classic()}
		c.pause(5 * time.Minute)
		c.is("1g.20gb@2") // allocated to a pod
		stop()
	})
}

// After a reboot the agent creates the instances again, with the same IDs.
func TestAgentCreatesMIGPartitionsForAResourceAfterAReboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMIGNode(t)
		for _, c.boot = range []string{"first", "second"} {
			config := c.config()
			config.Settings = c.classic(byProfile(t, "3g.40gb", "example.com/large"))
			stop := c.run(config)
			c.pause(5 * time.Minute)
			c.is("3g.40gb@0", "3g.40gb@4")
			want := []string{migtest.Device + "-mig-3g-40gb-at-0", migtest.Device + "-mig-3g-40gb-at-4"}
			if got := c.healthyOf("example.com/large"); !slices.Equal(got, want) {
				t.Errorf("%s boot: healthy: %q", c.boot, got)
			}
			stop()
			for _, place := range c.Instances() {
				c.Remove(place)
			}
		}
	})
}
