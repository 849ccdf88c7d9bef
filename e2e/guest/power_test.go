package guest_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"chandler.dev/e2e/guest"
)

var resets = flag.Int("resets", 200, "how often TestPowerLoss resets the guest; once with -short")

// resetsOfOne is the number of resets of one guest: the GPUs on its disk do not become free again.
const resetsOfOne = 10

// recordedHosts are the recorded hosts of cmd/restless.
var recordedHosts = []string{"gaudi/testdata/gaudi2x8.host", "amdgpu/testdata/mi210x8.host"}

// TestPowerLoss resets a guest at random moments while an agent starts, prepares, unprepares and
// allocates with its directories on a real ext4. A reset loses the guest kernel's unwritten data.
// After each reset, the agent must start, respect each allocated device, and allocate all other
// devices to new claims.
func TestPowerLoss(t *testing.T) {
	all := *resets
	if testing.Short() {
		all = 1
	}
	for done := 0; done < all; done += resetsOfOne {
		t.Run(fmt.Sprintf("from %d", done), func(t *testing.T) { losePower(t, min(resetsOfOne, all-done)) })
	}
}

func losePower(t *testing.T, resets int) {
	files := make(map[string]string)
	args := []string{"restless", "--agent", "/usr/bin/chandler", "--disk", "/disk/kubelet", "--memory", "/run/node", "--journal", "/dev/vdb"}
	for _, host := range recordedHosts {
		content, err := os.ReadFile(filepath.Join("../../discovery/families", host))
		if err != nil {
			t.Fatal(err)
		}
		name := "/hosts/" + filepath.Base(host)
		files[name] = string(content)
		args = append(args, name)
	}
	g := guest.Boot(t, guest.Config{
		Programs: map[string]string{"restless": guest.Build(t, "chandler.dev/e2e/cmd/restless")},
		Files:    files,
		Disks:    []guest.Disk{{Size: 64, Ext4: true}, {Size: 4}},
	})
	for number := range resets + 1 {
		if number > 0 {
			g.Reset(t)
		}
		g.Mount(t, "/dev/vda", "/disk", "ext4", "")
		node := g.Start(t, args...)
		moment, span := "working", 3*time.Second
		switch {
		case number == resets:
			span = 1 // 1 ns: reaching this point is enough
		case rand.IntN(4) == 0: //nolint:gosec // random test times need no secrecy
			moment, span = "started", 6*time.Second
		}
		node.Until(t, moment)
		time.Sleep(rand.N(span)) //nolint:gosec // random test times need no secrecy
		if said := node.Output(); strings.Contains(said, "fault:") {
			t.Fatalf("after %d resets: %s", number, said)
		}
	}
	t.Logf("%d resets", resets)
}
