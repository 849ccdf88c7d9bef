package hostservice

import (
	"context"
	"errors"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/internal/hostservice/wire"
)

// partitioned is a service with chandler-host in place of a program, which records its arguments.
func partitioned(t *testing.T, result error) (s *service, changes *[]string) {
	s, changes = newService(t), new([]string)
	s.config.Partitions = map[string]PartitionProgram{"nvml": {Args: facts.ChangeArgs, Run: func(args []string, _ []*os.File) (*wire.Output, error) {
		*changes = append(*changes, strings.Join(args, " "))
		return &wire.Output{Text: "done\n", Warning: "no node"}, result
	}}}
	return s, changes
}

// leased returns a context with a lease on a function.
func (s *service) leased(t *testing.T, function string) context.Context {
	return WithLease(t.Context(), Lease{Name: "unit a", Function: s.key(function)})
}

const instanceUUID = "MIG-5d2c1f01-8a41-4e0b-9c37-0b6f3d9ae401"

// The program of the service makes the change, and the agent gets its output. The session begins
// with the first change.
func TestPartitions(t *testing.T) {
	s, changes := partitioned(t, nil)
	client := s.client()
	const older = "MIG-GPU-5d2c1f01-8a41-4e0b-9c37-0b6f3d9ae401/13/0"
	var want []string
	for _, c := range []struct {
		change discovery.PartitionChange
		args   string
	}{
		{discovery.PartitionChange{Place: "1g.10gb+me.all@4"}, "--create=1g.10gb+me.all@4"},
		{discovery.PartitionChange{Place: "2g.20gb@0", HasBegun: true}, "--create=2g.20gb@0 --begun"},
		{discovery.PartitionChange{Place: "3g.40gb-me@12", Remove: true, UUID: instanceUUID}, "--remove=3g.40gb-me@12 --uuid=" + instanceUUID},
		{discovery.PartitionChange{Place: "7g.1410gb@0", Remove: true, UUID: older, HasBegun: true}, "--remove=7g.1410gb@0 --uuid=" + older + " --begun"},
	} {
		want = append(want, "--gpu="+disk+" "+c.args)
		c.change.Function = disk
		output, warning, err := client.ChangePartition(s.leased(t, disk), "nvml", c.change)
		if err != nil || string(output) != "done\n" || warning != "no node" {
			t.Errorf("%s: %q, %q, %v", c.args, output, warning, err)
		}
	}
	if diff := cmp.Diff(want, *changes); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	if !strings.Contains(s.log.String(), "removed partition 3g.40gb-me@12 of function "+disk+`, lease "unit a": <nil>`) {
		t.Errorf("log %s", s.log.String())
	}
}

// The error of the program arrives, and a change without a lease on the function is not sent.
func TestPartitionFails(t *testing.T) {
	s, changes := partitioned(t, errors.New("it ended: exit status 1: in use"))
	change := discovery.PartitionChange{Function: disk, Place: "1g.10gb@4"}
	if _, _, err := s.client().ChangePartition(s.leased(t, disk), "nvml", change); err == nil || err.Error() != "it ended: exit status 1: in use" {
		t.Errorf("error %v", err)
	}
	for _, ctx := range []context.Context{t.Context(), s.leased(t, other)} {
		if _, _, err := s.client().ChangePartition(ctx, "nvml", change); err == nil || !strings.Contains(err.Error(), "the lease is on function") {
			t.Errorf("error %v", err)
		}
	}
	if len(*changes) != 1 {
		t.Errorf("changes %v", *changes)
	}
	if _, _, err := NewClient("/nowhere", nil).ChangePartition(s.leased(t, disk), "nvml", change); !errors.Is(err, ErrAway) || !errors.Is(err, discovery.ErrTransient) {
		t.Errorf("without a service: %v", err)
	}
}

// The service checks each change itself. A refused change reaches no program, and is logged.
func TestPartitionRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*wire.PartitionChange)
		want   string
	}{
		"program":              {func(c *wire.PartitionChange) { c.Program = "sh" }, `by program "sh" are not`},
		"no place":             {func(c *wire.PartitionChange) { c.Place = "" }, "is not the place"},
		"arguments as place":   {func(c *wire.PartitionChange) { c.Place = "1g.10gb@4 --gpus=/etc" }, "is not the place"},
		"two lines":            {func(c *wire.PartitionChange) { c.Place = "1g.10gb@4\n" }, "is not the place"},
		"path as place":        {func(c *wire.PartitionChange) { c.Place = "../1g.10gb@4" }, "is not the place"},
		"compute instance":     {func(c *wire.PartitionChange) { c.Place = "1c.2g.10gb@4" }, "is not the place"},
		"place too long":       {func(c *wire.PartitionChange) { c.Place = "1g.10gb+" + strings.Repeat("a", 1<<16) + "@4" }, "is not the place"},
		"UUID of a GPU":        {func(c *wire.PartitionChange) { c.Remove, c.UUID = true, strings.TrimPrefix(instanceUUID, "MIG-") }, "is not the UUID"},
		"UUID and more":        {func(c *wire.PartitionChange) { c.Remove, c.UUID = true, instanceUUID+"\n" }, "is not the UUID"},
		"UUID for a creation":  {func(c *wire.PartitionChange) { c.UUID = instanceUUID }, "is not the UUID"},
		"no lease":             {func(c *wire.PartitionChange) { c.Lease = "" }, "names no lease"},
		"path as function":     {func(c *wire.PartitionChange) { c.Function = "../" + disk }, "is not the address"},
		"removed function":     {func(c *wire.PartitionChange) { c.Function = "0000:05:00.0" }, "is missing"},
		"another function":     {func(c *wire.PartitionChange) { c.Function = other }, "is not the one of the lease"},
		"another session":      {func(c *wire.PartitionChange) { c.Session = "t" }, "another agent"},
		"none of the sessions": {func(c *wire.PartitionChange) { c.Session = "" }, "another agent"},
	} {
		t.Run(name, func(t *testing.T) {
			s, changes := partitioned(t, nil)
			if err := s.beginSession(t.Context(), "s"); err != nil {
				t.Fatal(err)
			}
			change := wire.PartitionChange{Session: "s", Lease: "unit a", Function: disk, Inode: s.key(disk).Inode, Program: "nvml", Place: "1g.10gb@4"}
			c.change(&change)
			err := s.client().call(t.Context(), http.MethodPut, wire.PartitionsPath, change, nil)
			if err == nil || !strings.Contains(err.Error(), c.want) || len(*changes) > 0 {
				t.Errorf("error %v, want %q; changes %v", err, c.want, *changes)
			}
			if a := (*answer)(nil); !errors.As(err, &a) || !strings.Contains(s.log.String(), "refused: "+a.text) {
				t.Errorf("error %v is not in the log %q", err, s.log.String())
			}
		})
	}
}

// The next agent's session begins after a change of the earlier agent.
func TestPartitionOfEarlierAgent(t *testing.T) {
	s, _ := partitioned(t, nil)
	began, release := make(chan struct{}), make(chan struct{})
	s.config.Partitions["nvml"] = PartitionProgram{Args: facts.ChangeArgs, Run: func([]string, []*os.File) (*wire.Output, error) {
		close(began)
		<-release
		return &wire.Output{}, nil
	}}
	changed, begun := make(chan error, 1), make(chan error, 1)
	ctx, next := s.leased(t, disk), s.client()
	go func() {
		_, _, err := s.client().ChangePartition(ctx, "nvml", discovery.PartitionChange{Function: disk, Place: "1g.10gb@4"})
		changed <- err
	}()
	<-began
	limited, cancel := context.WithCancel(t.Context())
	cancel()
	if err := next.BeginSession(limited); err == nil || !strings.Contains(err.Error(), "a write of partitions of function "+disk) {
		t.Errorf("during the change: %v", err)
	}
	go func() { begun <- next.BeginSession(t.Context()) }()
	close(release)
	if err := errors.Join(<-changed, <-begun); err != nil {
		t.Error(err)
	}
}
