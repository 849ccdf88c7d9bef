//go:build cgo

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/gpus"

	"chandler.dev/cmd/chandler-host/mocked"
	"chandler.dev/discovery/families/nvidia/facts"
)

func machine(t *testing.T, configs ...gpus.Config) *mocked.Machine {
	t.Helper()
	m, err := mocked.New(t.TempDir(), configs...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// do runs the program once with the given flags. It returns an error if no instance was created.
func do(m *mocked.Machine, o options) (made facts.CreatedInstance, err error) {
	o.gpu = "0000:00:00.0"
	if o.hostRoot == "" {
		o.hostRoot = "/nowhere"
	}
	var out bytes.Buffer
	if err := o.changeInstance(m, &out, io.Discard); err != nil {
		return made, err
	}
	if o.create != "" {
		err = json.Unmarshal(out.Bytes(), &made)
	}
	if made.Refused != "" {
		err = errors.New(made.Refused)
	}
	return made, err
}

func refused(t *testing.T, err error, want string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %q in it", err, want)
	}
}

// A created instance has the requested properties, and is gone after its removal. Both operations
// can be repeated.
func TestCreateAndRemovePartitions(t *testing.T) {
	m := machine(t, gpus.H100_SXM5_80GB)
	r, err := newReader(m, []string{"0000:00:00.0"})
	if err != nil {
		t.Fatal(err)
	}
	made, err := do(m, options{create: "3g.40gb@4"})
	if err != nil {
		t.Fatal(err)
	}
	again, err := do(m, options{create: "3g.40gb@4"})
	if err != nil || again.UUID != made.UUID || made.UUID == "" || made.Found || !again.Found {
		t.Errorf("created twice: %+v and %+v, %v", made, again, err)
	}
	got := read(t, r)[0].Instances
	if len(got) != 1 || got[0].UUID != made.UUID || got[0].Profile != "3g.40gb" || *got[0].Placement != (facts.Placement{Start: 4, Size: 4}) || got[0].GI != made.GI {
		t.Errorf("read %+v, made %+v", got, made)
	}
	for place, want := range map[string]string{
		"1g.10gb@5": "something else is in the way: GPU instance 1, 3g.40gb@4",
		"7g.80gb@0": "something else is in the way",
		"3g.40gb@2": "the GPU has no place 3g.40gb@2",
		"3g.40gb":   "want PROFILE@START",
		"5g.50gb@0": "the GPU has no place",
	} {
		_, err := do(m, options{create: place})
		refused(t, err, want)
	}
	if _, err := do(m, options{remove: "1g.10gb@5"}); err != nil {
		t.Errorf("there was no such instance, and that is an error: %v", err)
	}
	if _, err := do(m, options{remove: "3g.40gb@4", uuid: "MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e401"}); err == nil {
		t.Error("an instance of another program was removed")
	}
	if err := m.Run(made.UUID, true); err != nil {
		t.Fatal(err)
	}
	_, err = do(m, options{remove: "3g.40gb@4"})
	refused(t, err, "(19)") // NVML_ERROR_IN_USE
	if err := m.Run(made.UUID, false); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := do(m, options{remove: "3g.40gb@4", uuid: made.UUID}); err != nil {
			t.Error(err)
		}
	}
	if left := m.Instances(0); len(left) > 0 {
		t.Errorf("left: %+v", left)
	}
	_, err = do(m, options{create: "1g.10gb@0", remove: "1g.10gb@0"})
	refused(t, err, "either")
}

// After any failure, and wherever the program is killed, no incomplete instance remains, or the
// next call completes it.
func TestCreationFails(t *testing.T) {
	fail := func(m *mocked.Machine, steps ...string) {
		m.Before = func(step string) nvml.Return {
			if slices.Contains(steps, step) {
				return nvml.ERROR_UNKNOWN
			}
			return nvml.SUCCESS
		}
	}
	m := machine(t, gpus.A100_SXM4_40GB)
	for _, step := range []string{"create-gi", "create-ci"} {
		fail(m, step)
		_, err := do(m, options{create: "2g.10gb@2"})
		refused(t, err, "create its")
		if left := m.Instances(0); len(left) > 0 {
			t.Errorf("%s failed, and left %+v", step, left)
		}
	}
	fail(m, "create-ci", "destroy-gi")
	made, err := do(m, options{create: "2g.10gb@2"})
	refused(t, err, "remove its GPU instance again")
	if made.Refused != "" {
		t.Errorf("something is left, and it is said that nothing was: %+v", made)
	}
	fail(m)
	r, err := newReader(m, []string{"0000:00:00.0"})
	if err != nil {
		t.Fatal(err)
	}
	if got := read(t, r)[0].Empty; len(got) != 1 || got[0] != (facts.Empty{Placement: facts.Placement{Start: 2, Size: 2}, Profile: "2g.10gb"}) {
		t.Errorf("GPU instances that nothing computes in: %+v", got)
	}
	if made, err := do(m, options{create: "2g.10gb@2", hasBegun: true}); err != nil || made.UUID == "" || made.Found {
		t.Errorf("created what was left half created: %+v, %v", made, err)
	}
	fail(m, "destroy-gi")
	_, err = do(m, options{remove: "2g.10gb@2"})
	refused(t, err, "its GPU instance")
	fail(m)
	if _, err = do(m, options{remove: "2g.10gb@2", hasBegun: true}); err != nil || len(m.Instances(0)) > 0 {
		t.Errorf("remove what was left half removed: %v; left %+v", err, m.Instances(0))
	}
}

// A new GPU instance of an administrator, still without a compute instance, stays unchanged when an
// instance is created or removed at its place. The GPU instance is ours only if the caller has
// begun its creation.
func TestHalfCreatedByAnotherProgram(t *testing.T) {
	m := machine(t, gpus.A100_SXM4_40GB)
	c, err := newPartitioner(m, "0000:00:00.0")
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.parsePlace("2g.10gb@0")
	if err != nil {
		t.Fatal(err)
	}
	if _, ret := c.device.CreateGpuInstanceWithPlacement(&p.info, &p.at); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	made, err := do(m, options{create: "2g.10gb@0"})
	refused(t, err, "another program has created its GPU instance")
	if made.Refused == "" {
		t.Error("it is not said that nothing was left")
	}
	if _, err := do(m, options{remove: "2g.10gb@0"}); err != nil {
		t.Error(err)
	}
	if now := m.Instances(0); len(now) != 1 || len(now[0].Parts) > 0 {
		t.Errorf("it is %+v now", now)
	}
	if made, err := do(m, options{create: "2g.10gb@0", hasBegun: true}); err != nil || made.Found {
		t.Errorf("what the caller has begun: %+v, %v", made, err)
	}
}

// A divided instance is neither allocated as a whole nor removed.
func TestDivided(t *testing.T) {
	m := machine(t, gpus.A100_SXM4_40GB)
	c, err := newPartitioner(m, "0000:00:00.0")
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.parsePlace("2g.10gb@0")
	if err != nil {
		t.Fatal(err)
	}
	instance, ret := c.device.CreateGpuInstanceWithPlacement(&p.info, &p.at)
	if ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	if _, err := createCompute(instance, 1); err != nil {
		t.Fatal(err)
	}
	_, err = do(m, options{create: "2g.10gb@0"})
	refused(t, err, "divided")
	_, err = do(m, options{remove: "2g.10gb@0"})
	refused(t, err, "divided")
}

// The nodes that open an instance are created as the kernel driver specifies.
func TestMakeNodes(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	m, err := mocked.New(dir, gpus.H100_SXM5_80GB)
	if err != nil {
		t.Fatal(err)
	}
	o := options{create: "1g.10gb@3", hostRoot: dir}
	if err := os.WriteFile(filepath.Join(dir, "proc/devices"), []byte("Character devices:\n195 nvidia\n506 nvidia-caps\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := do(m, o); err != nil {
			t.Fatal(err)
		}
	}
	nodes, err := filepath.Glob(filepath.Join(dir, "dev/nvidia-caps/nvidia-cap*"))
	if err != nil || len(nodes) != 2 {
		t.Fatalf("nodes %v, %v", nodes, err)
	}
	for _, node := range nodes {
		info, err := os.Stat(node)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != os.ModeDevice|os.ModeCharDevice|0o444 {
			t.Errorf("%s: %v", node, info.Mode())
		}
	}
}

// If the administrator has configured the driver against the creation of nodes, no node is created,
// and the program reports the reason.
func TestNodesOfWhichTheDriverWantsNone(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	c := &partitioner{dev: dir}
	access := filepath.Join(dir, "access")
	for modify, want := range map[string]string{"0": "DeviceFileModify: 0", "1": ""} {
		if err := os.WriteFile(access, []byte("DeviceFileMinor: 4"+modify+"\nDeviceFileMode: 292\nDeviceFileModify: "+modify+"\n"), 0o444); err != nil {
			t.Fatal(err)
		}
		err := c.makeNode(506, access)
		if want != "" {
			refused(t, err, want)
		} else if err != nil {
			t.Error(err)
		}
	}
	nodes, err := filepath.Glob(filepath.Join(dir, "nvidia-caps/*"))
	if err != nil || len(nodes) != 1 || filepath.Base(nodes[0]) != "nvidia-cap41" {
		t.Errorf("nodes %v, %v", nodes, err)
	}
}

// After creations and removals in any order, the machine has the last created instances.
func TestCreatePartitionsAtRandom(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	m := machine(t, gpus.H200_SXM5_141GB)
	c, err := newPartitioner(m, "0000:00:00.0")
	if err != nil {
		t.Fatal(err)
	}
	there := make(map[string]bool)
	for range 300 {
		k := c.kinds[random.IntN(len(c.kinds))]
		place := fmt.Sprintf("%s@%d", k.profile.Name, k.profile.Placements[random.IntN(len(k.profile.Placements))].Start)
		if random.IntN(2) == 0 {
			if _, err := do(m, options{remove: place}); err != nil {
				t.Fatal(err)
			}
			delete(there, place)
		} else if _, err := do(m, options{create: place}); err == nil {
			there[place] = true
		}
		if now := m.Instances(0); len(now) != len(there) {
			t.Fatalf("there are %+v, want %v", now, there)
		}
	}
}

// NVML reuses GPU instance IDs: an error of a removed instance does not count for the next one with
// the same ID.
func TestErrorsGoWithTheirInstance(t *testing.T) {
	m := machine(t, gpus.A100_SXM4_40GB)
	r, err := newReader(m, []string{"0000:00:00.0"})
	if err != nil {
		t.Fatal(err)
	}
	made, err := do(m, options{create: "3g.20gb@0"})
	if err != nil {
		t.Fatal(err)
	}
	read(t, r)
	r.noteXID(xid(device(m.Server, 0), 109, uint32(made.GI)), time.Now())
	r.noteXID(xid(device(m.Server, 0), 79, 0xffffffff), time.Now())
	if got := read(t, r)[0].XIDs; len(got) != 2 {
		t.Errorf("errors %+v", got)
	}
	if _, err := do(m, options{remove: "3g.20gb@0"}); err != nil {
		t.Fatal(err)
	}
	again, err := do(m, options{create: "4g.20gb@0"}) // without a read in between
	if err != nil || again.GI != made.GI {
		t.Fatalf("made %+v, then %+v, %v", made, again, err)
	}
	if got := read(t, r)[0].XIDs; len(got) != 1 || got[0].GI != nil {
		t.Errorf("errors %+v, want only that of the whole GPU", got)
	}
}
