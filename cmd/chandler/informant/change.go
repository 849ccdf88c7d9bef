package informant

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"time"

	"k8s.io/klog/v2"
)

// changeLimit limits the time for a change of a device. NVML creates a MIG instance in less than a
// second, unless it has to wake the GPU up first.
const changeLimit = time.Minute

// maxAnswer limits the answer to a change, in bytes.
const maxAnswer = 64 << 10

// ChangeDevice runs the program once with arguments for a change of a device, and returns its
// output. Then ChangeDevice makes the running program scan again. Changes of the same device run
// one at a time. A change longer than changeLimit is killed, with an unknown result.
func (n *Informant) ChangeDevice(ctx context.Context, args ...string) ([]byte, error) {
	limit := fmt.Errorf("%s has not ended within %s", n.Name, changeLimit)
	ctx, cancel := context.WithTimeoutCause(ctx, changeLimit, limit)
	defer cancel()
	leave, err := n.enterChange(ctx, n.Changes(args))
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, n.path, append(args, n.args...)...)
	cmd.WaitDelay = time.Second
	said, answer := &head{}, &bounded{}
	cmd.Stderr, cmd.Stdout = said, answer
	ended := make(chan error, 1)
	go func() {
		err := cmd.Run()
		n.lookAgain()
		leave()
		ended <- err
	}()
	select {
	case err = <-ended:
	case <-ctx.Done():
		select {
		case err = <-ended:
		case <-time.After(2 * time.Second): // the program hangs in the kernel, and cannot be killed
			return nil, context.Cause(ctx)
		}
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, n.endReason(err, said.text)
	case answer.Len() > maxAnswer:
		return nil, errors.New("its answer is too long")
	}
	if complaint := n.firstLine(said.text); complaint != "" {
		klog.FromContext(ctx).Info("A vendor's program succeeded with a warning", "program", n.path, "complaint", complaint)
	}
	return answer.Bytes(), nil
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

// lookAgain requests a scan from the running program. It does not block.
func (n *Informant) lookAgain() {
	select {
	case n.scanRequests <- struct{}{}:
	default: // a request is pending already
	}
}

// bounded keeps at most one byte more than maxAnswer.
type bounded struct{ bytes.Buffer }

func (b *bounded) Write(p []byte) (int, error) {
	b.Buffer.Write(p[:min(len(p), maxAnswer+1-b.Len())])
	return len(p), nil
}
