package informant

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/internal/child"
)

// changeLimit limits the time for a change of a device. NVML creates a MIG instance in less than a
// second, unless it has to wake the GPU up first.
const changeLimit = time.Minute

// ChangePartition runs the program once for a change, and returns its output. Then ChangePartition
// makes the running program scan again. Changes of the same function run one at a time. A change
// longer than changeLimit is killed, with an unknown result. A program that hangs in the kernel cannot
// be killed: ChangePartition returns only after the end of the program, because the caller has a lease
// until then. If this process is killed meanwhile, the program still has HeldFiles.
func (n *Informant) ChangePartition(ctx context.Context, c discovery.PartitionChange) ([]byte, error) {
	limit := fmt.Errorf("%s has not ended within %s", n.Name, changeLimit)
	ctx, cancel := context.WithTimeoutCause(ctx, changeLimit, limit)
	defer cancel()
	leave, err := n.enterChange(ctx, c.Function)
	if err != nil {
		return nil, err
	}
	defer leave()
	output, warning, err := n.change(ctx, c)
	n.requestScan()
	if err != nil {
		return nil, err
	}
	if warning != "" {
		klog.FromContext(ctx).Info("A vendor's program succeeded with a warning", "program", n.path, "complaint", warning)
	}
	return output, nil
}

// change runs the program once, or lets the host service run it, which has the same limit.
func (n *Informant) change(ctx context.Context, c discovery.PartitionChange) (output []byte, warning string, err error) {
	if n.service != nil {
		return n.service.ChangePartition(context.WithoutCancel(ctx), n.Service, c)
	}
	args, err := n.ChangeArgs(c)
	if err != nil {
		return nil, "", err
	}
	var held []*os.File
	if n.HeldFiles != nil {
		held = n.HeldFiles()
	}
	return child.Run(ctx, held, n.path, append(args, n.args...)...)
}

// enterChange waits until no other change of the device runs. The caller must call leave after its
// own change.
func (n *Informant) enterChange(ctx context.Context, device string) (leave func(), err error) {
	mine := make(chan struct{})
	for {
		n.mu.Lock()
		other := n.changing[device]
		if other == nil {
			n.changing[device] = mine
			n.mu.Unlock()
			return func() {
				n.mu.Lock()
				delete(n.changing, device)
				n.mu.Unlock()
				close(mine)
			}, nil
		}
		n.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, fmt.Errorf("%s still makes another change: %w", n.Name, context.Cause(ctx))
		}
	}
}

// passRequests passes requests for a scan to the running program, until deaf is closed.
func (n *Informant) passRequests(stdin io.Writer, deaf <-chan struct{}) {
	for {
		select {
		case <-deaf:
			return
		case <-n.scanRequests:
			if _, err := io.WriteString(stdin, "\n"); err != nil {
				return // the program has ended
			}
		}
	}
}

// requestScan requests a scan from the running program. It does not block.
func (n *Informant) requestScan() {
	select {
	case n.scanRequests <- struct{}{}:
	default: // a request is pending already
	}
}
