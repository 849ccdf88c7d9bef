package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"chandler.dev/e2e/chandler"
)

// TestHostChanges changes the host while the agent runs: a GPU disappears, returns, and is
// unreadable for a while.
func TestHostChanges(t *testing.T) {
	offers(t)
	const address, name = "0000:24:00.0", "pci-0000-24-00-0"
	host := node.NodePath(chandler.HostDir)
	link := filepath.Join(host, "sys/bus/pci/devices", address)
	target, err := os.Readlink(link)
	if err != nil {
		t.Fatal(err)
	}
	function := filepath.Join(filepath.Dir(link), target)
	before := offered(t)[name]

	t.Run("a GPU disappears", func(t *testing.T) {
		aside := filepath.Join(host, "aside")
		rename(t, function, aside)
		if err := os.Remove(link); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { // The GPU returns.
			rename(t, aside, function)
			if err := os.Symlink(target, link); err != nil {
				t.Error(err)
			}
		})
		until(t, "the GPU to leave the slices", func(ctx context.Context) error {
			return offersGPUs(ctx, 7)
		})
		if _, there := offered(t)[name]; there {
			t.Errorf("another GPU than %s has gone", name)
		}
	})
	t.Run("it comes back", func(t *testing.T) {
		until(t, "the GPU to be back in the slices", func(ctx context.Context) error {
			return offersGPUs(ctx, 8)
		})
		if after := offered(t)[name]; !equality.Semantic.DeepEqual(before.Attributes, after.Attributes) {
			t.Errorf("it is another: %v, was %v", after.Attributes, before.Attributes)
		}
	})
	t.Run("it cannot be read", func(t *testing.T) {
		vendor := filepath.Join(function, "vendor")
		aside := filepath.Join(function, "vendor.aside")
		rename(t, vendor, aside)
		if err := os.Mkdir(vendor, 0o755); err != nil { // Reading a directory as a file fails.
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.Remove(vendor); err != nil {
				t.Error(err)
			}
			rename(t, aside, vendor)
		})
		noticed(t, "attribute vendor")
		after, there := offered(t)[name]
		if !there || !equality.Semantic.DeepEqual(before.Attributes, after.Attributes) {
			t.Errorf("its last description is not kept: %v, was %v", after.Attributes, before.Attributes)
		}
		if err := offersGPUs(t.Context(), 8); err != nil {
			t.Error(err)
		}
	})
	t.Run("it is whole again", func(t *testing.T) {
		apply(t, gpuPod("back-again", address))
		running(t, "back-again")
	})
	nothingHeld(t)
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

func offered(t *testing.T) map[string]resourceapi.Device {
	t.Helper()
	devices, err := chandler.Devices(t.Context(), kube)
	if err != nil {
		t.Fatal(err)
	}
	return devices
}

func offersGPUs(ctx context.Context, want int) error {
	devices, err := chandler.Devices(ctx, kube)
	if err == nil && countGPUs(devices) != want {
		err = fmt.Errorf("there are %d", countGPUs(devices))
	}
	return err
}

// noticed waits until a line of the agent's log contains the words, and returns the line.
func noticed(t *testing.T, words string) (said string) {
	t.Helper()
	until(t, fmt.Sprintf("the agent to log %q", words), func(ctx context.Context) error {
		agent, err := chandler.AgentPod(ctx, kube)
		if err != nil {
			return err
		}
		log, err := kube.Logs(ctx, chandler.Namespace, agent.Name, "")
		if err != nil {
			return err
		}
		for line := range strings.Lines(log) {
			if strings.Contains(line, words) {
				said = line
				return nil
			}
		}
		return errors.New("it has not")
	})
	return said
}

// TestWhatTheAPIServerDrops reads in the log which fields the API server drops because of its
// feature gates. The agent must find these out before it publishes its first slice.
func TestWhatTheAPIServerDrops(t *testing.T) {
	without := noticed(t, "publishing accordingly")
	for _, gate := range []string{"DRAConsumableCapacity", "DRADeviceTaints", "DRAPartitionableDevices"} {
		if dropped := strings.Contains(without, `"`+gate+`"`); dropped == has(t, gate) {
			t.Errorf("the gate %s is on: %v; the agent says %s", gate, !dropped, without)
		}
	}
}
