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

// resetsOfOne is how often one guest is reset: the GPUs of its disk do not become free again.
const resetsOfOne = 10

// recordedHosts are those of cmd/restless.
var recordedHosts = []string{"gaudi/testdata/gaudi2x8.host", "amdgpu/testdata/mi210x8.host"}

// TestPowerLoss resets a guest at random moments while an agent starts, prepares, unprepares and allocates with its
// directories on a real ext4. A reset loses what the guest's kernel has not yet written. After each, the agent must
// start, honour each device that it allocated, and give all others to new claims.
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
			span = 1 // nanosecond: it is enough that the agent has come so far
		case rand.IntN(4) == 0: //nolint:gosec // nobody guesses it
			moment, span = "started", 6*time.Second
		}
		node.Until(t, moment)
		time.Sleep(rand.N(span)) //nolint:gosec // nobody guesses it
		if said := node.Output(); strings.Contains(said, "fault:") {
			t.Fatalf("after %d resets: %s", number, said)
		}
	}
	t.Logf("%d resets", resets)
}
