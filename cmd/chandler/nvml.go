package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/hostfs"
)

// nvmlProgram is the name of the program that asks NVML. NVML needs cgo, and may
// hang or crash, neither of which is to happen to the agent.
const nvmlProgram = "chandler-nvml"

// nvml runs the program and lays what it says over the host's file system, where
// the nvidia family finds it. Where the program is not there, or NVML is not, the
// host is as the kernel's files tell.
type nvml struct {
	program    string // its path
	driverRoot string // below which NVML lies, as this process sees it
	gpus       string // the kernel's list of GPUs, likewise
	host       *hostfs.Overlay
	changed    func() // called when the program said something new

	interval time.Duration // how often the program is to speak

	silence time.Duration // how long the program may say nothing
	retry   time.Duration // how long to wait when it ended; doubled until it is maxRetry
	keep    time.Duration // how long what it said is believed when it has ended

	settled func() // closes ready
	ready   chan struct{}
	heard   time.Time // when it last said something
	logged  string    // the last reason why it ended
}

const (
	nvmlInterval = 10 * time.Second

	// nvmlSilence is longer, since NVML wakes each GPU up at first, which may take
	// seconds for each.
	nvmlSilence  = 2 * time.Minute
	nvmlRetry    = time.Second
	nvmlMaxRetry = time.Minute
	nvmlKeep     = 2 * time.Minute

	// nvmlLook is how often to see whether the kernel driver was loaded.
	nvmlLook = 10 * time.Second

	// nvmlFirstWord is how long the first scan waits for what NVML says, so that
	// an agent that starts does not take back what the last one published.
	nvmlFirstWord = 30 * time.Second

	// nvmlOnce is how long a command that prints once waits.
	nvmlOnce = 10 * time.Second
)

// overlayNVML returns what asks NVML about the host, and lets the host's file
// system take the answers; nil if nobody can be asked, or the host is not this
// machine, or has the answers in a file already.
func overlayNVML(host *discovery.Host, hostRoot string) *nvml {
	program := findProgram(nvmlProgram)
	if program == "" || !thisMachine(host.FS) || host.Exists(facts.Path) {
		return nil
	}
	overlay := hostfs.NewOverlay(host.FS)
	host.FS = overlay
	return newNVML(program, overlay, hostRoot, host.Roots["nvidia"])
}

func newNVML(program string, host *hostfs.Overlay, hostRoot, driverRoot string) *nvml {
	n := &nvml{
		program:    program,
		driverRoot: filepath.Join(hostRoot, driverRoot),
		gpus:       filepath.Join(hostRoot, "proc/driver/nvidia/gpus"),
		host:       host,
		changed:    func() {},
		interval:   nvmlInterval,
		silence:    nvmlSilence,
		retry:      nvmlRetry,
		keep:       nvmlKeep,
		ready:      make(chan struct{}),
	}
	n.settled = sync.OnceFunc(func() { close(n.ready) })
	return n
}

// findProgram returns the path of a program that lies beside this one, or where
// the shell would find it, "" if there is none.
func findProgram(name string) string {
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), name)
		if path, err := exec.LookPath(beside); err == nil {
			return path
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return ""
	}
	return path
}

// thisMachine reports whether a host's files are those of the machine that this
// program runs on, and not of a simulated or copied one.
func thisMachine(host fs.FS) bool {
	const bootID = "proc/sys/kernel/random/boot_id"
	theirs, err := fs.ReadFile(host, bootID)
	ours, ourErr := os.ReadFile("/" + bootID)
	return err == nil && ourErr == nil && bytes.Equal(theirs, ours)
}

// loaded reports whether NVIDIA's kernel driver is.
func (n *nvml) loaded() bool {
	_, err := fs.Stat(n.host, "proc/driver/nvidia")
	return err == nil
}

// set lays a text over the host's file system, or takes it away.
func (n *nvml) set(text []byte) {
	if n.host.Set(strings.TrimPrefix(facts.Path, "/"), text) {
		n.changed()
	}
}

// once asks the program one time. What it says is then in the host's file
// system. That the kernel driver is not loaded is no error.
func (n *nvml) once(ctx context.Context) error {
	if !n.loaded() {
		return nil
	}
	deadline := fmt.Errorf("no answer in %s", nvmlOnce)
	ctx, cancel := context.WithTimeoutCause(ctx, nvmlOnce, deadline)
	defer cancel()
	heard := errors.New("heard it")
	err := n.session(ctx, func(text []byte) error {
		n.set(text)
		return heard
	})
	switch {
	case errors.Is(err, heard):
		return nil
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	}
	return fmt.Errorf("%s: %w", nvmlProgram, err)
}

// askNVML asks NVML about the host once, if it can be asked. That it does not
// answer is said, and does no harm.
func askNVML(ctx context.Context, host *discovery.Host, hostRoot string, errOut io.Writer) {
	n := overlayNVML(host, hostRoot)
	if n == nil {
		return
	}
	if err := n.once(ctx); err != nil {
		fmt.Fprintln(errOut, "NVML was not asked:", err)
	}
}

// run keeps the program running until the context ends. What ended it is logged,
// once for each reason.
func (n *nvml) run(ctx context.Context) {
	defer n.settled()
	wait := n.retry
	for ctx.Err() == nil {
		if !n.loaded() {
			n.set(nil)
			n.heard = time.Time{}
			n.settled()
			waitFor(ctx, nil, nvmlLook)
			continue
		}
		err := n.session(ctx, func(text []byte) error {
			n.set(text)
			n.heard, n.logged, wait = time.Now(), "", n.retry
			n.settled()
			return nil
		})
		if ctx.Err() != nil {
			return
		}
		n.settled()
		n.forget(err)
		if n.logged != err.Error() {
			n.logged = err.Error()
			klog.FromContext(ctx).Info("NVML is not being asked", "program", n.program, "reason", err)
		}
		waitFor(ctx, nil, wait)
		wait = min(2*wait, nvmlMaxRetry)
	}
}

// forget says that nothing is known any more of what was, unless the program may
// soon be back. If it never said anything, nothing is taken back.
func (n *nvml) forget(reason error) {
	if !n.heard.IsZero() && time.Since(n.heard) >= n.keep {
		n.set(facts.FormatError(reason))
	}
}

// session starts the program and hands each line that it writes to hear, until
// it ends, is silent for too long, writes nonsense, hear returns an error, or the
// context ends. It returns why, and leaves no program behind that can be ended.
func (n *nvml) session(ctx context.Context, hear func(text []byte) error) error {
	cmd := exec.Command(n.program, "--watch", "--interval="+n.interval.String(), "--driver-root="+n.driverRoot, "--gpus="+n.gpus)
	said := &head{}
	cmd.Stderr = said
	stdin, err := cmd.StdinPipe() // the program ends when it is closed, as when this one dies
	if err != nil {
		return err
	}
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	lines, deaf, ended := make(chan []byte), make(chan struct{}), make(chan struct{})
	var end error // once ended is closed
	go func() {
		scanner := bufio.NewScanner(stdout)
		scanner.Buffer(nil, facts.MaxSize+1)
		for scanner.Scan() {
			select {
			case lines <- bytes.Clone(scanner.Bytes()):
			case <-deaf:
			}
		}
		close(lines)
		end = errors.Join(scanner.Err(), cmd.Wait())
		close(ended)
	}()
	reason := n.listen(ctx, lines, hear)
	close(deaf)
	if reason != nil {
		_ = cmd.Process.Kill()
		n.forget(reason)
	}
	if ctx.Err() != nil {
		select {
		case <-ended:
		case <-time.After(time.Second):
		}
		return reason
	}
	// One that hangs in the kernel cannot be ended, and no second one is started
	// beside it; only this process may end before it.
	select {
	case <-ctx.Done():
	case <-ended:
		if reason == nil {
			reason = ending(end, said.text)
		}
	}
	return reason
}

// listen hears lines until there are no more, which is no error, or something
// is wrong with them.
func (n *nvml) listen(ctx context.Context, lines <-chan []byte, hear func([]byte) error) error {
	silence := time.NewTimer(n.silence)
	defer silence.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-silence.C:
			return fmt.Errorf("silent for %s", n.silence)
		case text, more := <-lines:
			if !more {
				return nil
			}
			if _, err := facts.Parse(string(text)); err != nil {
				return err
			}
			if err := hear(text); err != nil {
				return err
			}
			silence.Reset(n.silence)
		}
	}
}

// head keeps the beginning of what a program writes to its standard error.
type head struct{ text []byte }

func (h *head) Write(p []byte) (int, error) {
	const enough = 512
	h.text = append(h.text, p[:min(len(p), enough-len(h.text))]...)
	return len(p), nil
}

// ending returns why a program ended: how, and the first line of what it wrote.
func ending(err error, said []byte) error {
	line, _, _ := strings.Cut(strings.TrimSpace(string(said)), "\n")
	line = strings.TrimPrefix(line, nvmlProgram+": ")
	if err == nil {
		return fmt.Errorf("it ended: %s", line)
	}
	return fmt.Errorf("it ended: %w: %s", err, line)
}
