package chart

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/chandler"
)

// TestFirstDay installs Chandler without Docker and without a registry, as docs/install.md describes it:
// the archive of "make image" is imported into containerd, and a node selector and the mode ReportOnly
// limit what the agents do. Labels of the node then start the agent and offer the devices.
func TestFirstDay(t *testing.T) {
	in := start(t)
	out := t.TempDir()
	build := exec.CommandContext(t.Context(), "make", "-C", in.project.Dir, "image", "VERSION=v0.1.0", "PLATFORMS="+runtime.GOARCH, "IMAGES="+out)
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("make image: %v\n%s", err, output)
	}
	archive, err := os.Open(filepath.Join(out, "chandler-v0.1.0-image.tar"))
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(in.node.ImportImages(within(t), archive), archive.Close())
	if err != nil {
		t.Fatal(err)
	}

	in.run(chandler.SimulatedValues, "install", "chandler", in.project.Chart(), "--create-namespace", "--values=-",
		"--set=image.repository=chandler.dev/chandler,image.tag=v0.1.0,nodeSelector.chandler=try,config.mode=ReportOnly")
	set, err := in.kube.AppsV1().DaemonSets(chandler.Namespace).Get(within(t), chandler.DaemonSet, metav1.GetOptions{})
	if err != nil || set.Status.DesiredNumberScheduled != 0 {
		t.Errorf("the agent runs on %d nodes without the label of the node selector: %v", set.Status.DesiredNumberScheduled, err)
	}
	in.kubectl("label", "node", "node", "chandler=try")
	in.hasImage("chandler.dev/chandler:v0.1.0")
	inventory, err := in.node.Kubectl(within(t), "-n", chandler.Namespace, "exec", "daemonset/chandler", "--", "/chandler", "inventory").CombinedOutput()
	if err != nil || !strings.HasPrefix(string(inventory), "node   8 gpu (0 free)\n") || !strings.Contains(string(inventory), "the mode is ReportOnly") {
		t.Errorf("the inventory: %v\n%s", err, inventory)
	}
	if devices := in.devices(); len(devices) > 0 {
		t.Errorf("with ReportOnly, slices have %q", devices)
	}

	in.kubectl("label", "node", "node", "chandler.dev/mode=Auto")
	in.offersByDRA("gpus offered", true)
	in.kubectl("label", "node", "node", "chandler.dev/mode-")
	in.offersByDRA("gpus withdrawn", false)
	in.run("", "upgrade", "chandler", in.project.Chart(), "--reset-then-reuse-values", "--set=nodeSelector.chandler=null,config.mode=Auto", "--wait", "--timeout=1m")
	in.kubectl("label", "node", "node", "chandler-")
	in.offersByDRA("gpus offered on a node without the label", true)
	in.run("", "uninstall", "chandler", "--wait")
}

// offersByDRA waits until slices have a GPU, or none.
func (in *installed) offersByDRA(what string, offered bool) {
	in.t.Helper()
	err := in.kube.Until(within(in.t), what, func(ctx context.Context) error {
		devices, err := chandler.Devices(ctx, in.kube)
		_, found := devices["pci-0000-23-00-0"]
		if err == nil && found != offered {
			err = fmt.Errorf("slices have %d devices", len(devices))
		}
		return err
	})
	if err != nil {
		in.t.Fatal(err)
	}
}
