package chandler

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"chandler.dev/e2e/cluster"
)

// LayOutMachine creates the files of a recorded host in a directory of the node, so that an
// agent accepts the directory as its own machine: the agent runs vendor programs for that
// machine only. /proc is the real one; the proc files of drivers are in the subdirectory
// kernel/proc. undo removes the host.
func (p Project) LayOutMachine(ctx context.Context, n *cluster.Node, dir, host string) (undo func() error, err error) {
	on := n.NodePath(dir)
	var mounted []string
	undo = func() error {
		var errs []error
		for _, mount := range mounted {
			if out, err := n.Command(context.WithoutCancel(ctx), "umount", "--lazy", mount).CombinedOutput(); err != nil {
				errs = append(errs, fmt.Errorf("umount %s: %w\n%s", mount, err, out))
			}
		}
		if len(errs) > 0 {
			return errors.Join(errs...) // a mounted directory must not be removed
		}
		return os.RemoveAll(on)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, undo())
		}
	}()
	recording := filepath.Join(on, "machine.host")
	if err := errors.Join(os.MkdirAll(on+"/kernel", 0o755), os.WriteFile(recording, []byte(host), 0o644)); err != nil {
		return undo, err
	}
	if _, err := p.run(ctx, "simulate", "--device-nodes", on, recording); err != nil {
		return undo, err
	}
	if err := errors.Join(os.Rename(on+"/proc", on+"/kernel/proc"), os.Mkdir(on+"/proc", 0o755)); err != nil {
		return undo, err
	}
	for _, mount := range [][2]string{
		{"/proc", dir + "/proc"},
		{dir + "/kernel/proc/driver", dir + "/proc/driver"},
		{dir + "/kernel/proc/devices", dir + "/proc/devices"},
	} {
		if out, err := n.Command(ctx, "mount", "--bind", mount[0], mount[1]).CombinedOutput(); err != nil {
			return undo, fmt.Errorf("mount %s: %w\n%s", mount[1], err, out)
		}
		mounted = append([]string{mount[1]}, mounted...)
	}
	return undo, nil
}
