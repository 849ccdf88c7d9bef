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

// changeLimit is how long a change of a device may take. NVML makes a MIG instance in less
// than a second, unless it has to wake the GPU up first.
const changeLimit = time.Minute

// maxAnswer is how long the answer to a change may be, in bytes.
const maxAnswer = 64 << 10

// Change runs the program once with arguments that have it change a device, and returns
// what it writes. Then the program that keeps running is asked to look again. One change of
// a device is made at a time. A change that takes too long is killed, and may have been done
// or not.
func (n *Informant) Change(ctx context.Context, args ...string) ([]byte, error) {
	limit := fmt.Errorf("%s has not ended within %s", n.Name, changeLimit)
	ctx, cancel := context.WithTimeoutCause(ctx, changeLimit, limit)
	defer cancel()
	leave, err := n.enter(ctx, n.Changes(args))
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
		case <-time.After(2 * time.Second): // it hangs in the kernel, and cannot be killed
			return nil, context.Cause(ctx)
		}
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, n.ending(err, said.text)
	case answer.Len() > maxAnswer:
		return nil, errors.New("its answer is too long")
	}
	if complaint := n.firstLine(said.text); complaint != "" {
		klog.FromContext(ctx).Info("A vendor's program did what it was asked to, and complains", "program", n.path, "complaint", complaint)
	}
	return answer.Bytes(), nil
}

// enter has one change of a device at a time be made. The others wait.
func (n *Informant) enter(ctx context.Context, device string) (leave func(), err error) {
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

// urge tells the running program when it is to look again, until it is not heard any more.
func (n *Informant) urge(stdin io.Writer, deaf <-chan struct{}) {
	for {
		select {
		case <-deaf:
			return
		case <-n.again:
			if _, err := io.WriteString(stdin, "\n"); err != nil {
				return // it has ended
			}
		}
	}
}

// lookAgain asks the running program to look at once.
func (n *Informant) lookAgain() {
	select {
	case n.again <- struct{}{}:
	default: // it is to look already
	}
}

// bounded keeps no more than it takes to see that it is too much.
type bounded struct{ bytes.Buffer }

func (b *bounded) Write(p []byte) (int, error) {
	b.Buffer.Write(p[:min(len(p), maxAnswer+1-b.Len())])
	return len(p), nil
}
