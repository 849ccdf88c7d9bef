package sharing

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"chandler.dev/internal/hostservice/wire"
)

// The directories of a claim.
const (
	pipes        = "pipe" // where programs find the daemon
	logs         = "log"
	sharedMemory = "shm" // shared by programs and the daemon
)

// NVIDIA's programs.
const (
	control    = "nvidia-cuda-mps-control"
	management = "nvidia-smi"
)

// begin applies the settings of a claim. An earlier attempt must have been undone.
func (k *Supervisor) begin(ctx context.Context, c *claim, wanted *settings, how map[string]string) error {
	c.isTouched = true
	for _, dir := range []string{pipes, logs, sharedMemory} {
		if err := os.MkdirAll(filepath.Join(k.dir(c.UID), dir), 0o755); err != nil {
			return fmt.Errorf("make directory: %w", err)
		}
	}
	c.set(func() {
		c.How, c.Process, c.Begun, c.Broken, c.Changed, c.Unchanged, c.Boot = how, wire.Process{}, false, "", true, nil, k.boot
	})
	if err := k.saveClaim(c); err != nil {
		return err
	}
	for i, gpu := range wanted.gpus {
		if err := k.changeSetting(ctx, c.UID, gpu, wanted, true); err != nil {
			if isRefused(err) {
				c.set(func() { c.Changed, c.Unchanged = i > 0, wanted.gpus[i:] })
				err = errors.Join(err, k.saveClaim(c))
			}
			return err
		}
	}
	if !wanted.mps {
		return k.finishOrder(c)
	}
	if err := k.start(ctx, c, wanted); err != nil {
		return err
	}
	k.config.Log.Printf("claim %s: MPS daemon %d serves %s", c.UID, c.copy().Process.PID, how[gpus])
	return k.finishOrder(c)
}

// isRefused reports whether nvidia-smi exited with an error, or is missing, and so has changed
// nothing.
func isRefused(err error) bool {
	status := (*exec.ExitError)(nil)
	return errors.As(err, &status) && status.Exited() || errors.Is(err, exec.ErrNotFound)
}

// finishOrder records that the order is complete.
func (k *Supervisor) finishOrder(c *claim) error {
	c.set(func() { c.Begun = true })
	return k.saveClaim(c)
}

// reset restores the default settings of changed GPUs, and returns an error until they are restored:
// otherwise, the next claim could get a GPU in exclusive mode. A lost GPU counts as restored. Time
// slices cannot be read back.
func (k *Supervisor) reset(ctx context.Context, c *claim, w *settings) error {
	now := c.copy()
	if !now.Changed && !now.Begun {
		return nil
	}
	var errs []error
	for _, gpu := range w.gpus {
		if slices.Contains(now.Unchanged, gpu) {
			continue
		}
		err := k.changeSetting(ctx, c.UID, gpu, w, false)
		if w.timeSlice < 0 {
			err = k.isDefault(ctx, gpu, err)
		}
		status := (*exec.ExitError)(nil)
		if errors.As(err, &status) && slices.Contains(nothingThere, status.ExitCode()) {
			k.config.Log.Printf("claim %s: not set back: %v", c.UID, err)
			err = nil
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	c.set(func() { c.Begun, c.Changed = false, false })
	return nil
}

// isDefault returns nil if a GPU's compute mode is the default, and otherwise the error of setting
// or reading the mode.
func (k *Supervisor) isDefault(ctx context.Context, gpu string, set error) error {
	mode, err := k.runCommand(ctx, k.config.Begin, "", "", management, "-i", gpu, "--query-gpu=compute_mode", "--format=csv,noheader")
	switch mode = strings.TrimSpace(mode); {
	case set != nil && (err != nil || mode != "Default"):
		return set
	case err != nil:
		return fmt.Errorf("read the compute mode of GPU %s: %w", gpu, err)
	case mode != "Default":
		return fmt.Errorf("the compute mode of GPU %s is %q after it was set to DEFAULT", gpu, mode)
	}
	return nil
}

// nothingThere lists the exit statuses of nvidia-smi, by its manual, if the operation is not
// available on the GPU (3), or the GPU is not found (6), has no driver (9), has a driver without
// the function (13), or has fallen off the bus (15).
var nothingThere = []int{3, 6, 9, 13, 15}

// changeSetting applies a claim's setting to a GPU, or the default. With MPS, the GPU is in
// exclusive mode for the process of MPS. NVML has no documented call for time slices.
func (k *Supervisor) changeSetting(ctx context.Context, uid, gpu string, w *settings, on bool) error {
	what, args := "compute mode", []string{"-i", gpu, "-c", "DEFAULT"}
	switch {
	case w.timeSlice >= 0:
		n := 0
		if on {
			n = w.timeSlice
		}
		what, args = "time slice", []string{"compute-policy", "-i", gpu, "--set-timeslice=" + strconv.Itoa(n)}
	case on:
		args[3] = "EXCLUSIVE_PROCESS"
	}
	// This may take seconds, if no process makes the driver keep the GPU ready. The process is marked
	// as one of the claim: if this program is killed, the next one ends it before it changes the GPU.
	if _, err := k.runCommand(ctx, k.config.Begin, uid, "", management, args...); err != nil {
		return fmt.Errorf("%s of GPU %s: %w", what, gpu, err)
	}
	return nil
}

// start starts the daemon of a claim, and returns once the daemon answers and applies the limits.
func (k *Supervisor) start(ctx context.Context, c *claim, wanted *settings) error {
	ctx, cancel := context.WithTimeout(ctx, k.config.Begin)
	defer cancel()
	if err := k.mountShared(c.UID); err != nil {
		return err
	}
	out, err := os.OpenFile(filepath.Join(k.dir(c.UID), logs, "output.log"), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o640)
	if err != nil {
		return fmt.Errorf("log of the daemon: %w", err)
	}
	defer out.Close()
	// The daemon runs in the foreground to have a known process ID. As the leader of a session, the
	// daemon survives this process.
	cmd := exec.Command(control, "-f") //nolint:noctx // the daemon outlives all calls
	cmd.Env = append(k.environment(c.UID), "CUDA_VISIBLE_DEVICES="+strings.Join(wanted.gpus, ","))
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := k.run(c.UID, cmd); err != nil {
		return fmt.Errorf("start %s: %w", control, err)
	}
	p := wire.Process{PID: cmd.Process.Pid, Start: startTime(cmd.Process.Pid)}
	c.set(func() { c.Process = p })
	ended := make(chan struct{})
	go k.attendDaemon(c, p, func() { _ = cmd.Wait(); close(ended) }) // the exit status is not used
	if err := k.saveClaim(c); err != nil {
		return err
	}
	if err := k.waitAnswers(ctx, c.UID, ended); err != nil {
		return err
	}
	return k.limitProcesses(ctx, c.UID, wanted)
}

// waitAnswers returns once the daemon accepts commands.
func (k *Supervisor) waitAnswers(ctx context.Context, uid string, ended <-chan struct{}) error {
	for {
		_, err := k.command(ctx, uid, "get_server_list")
		if err == nil {
			return nil
		}
		select {
		case <-ended:
			return fmt.Errorf("%s ended at once%s", control, k.lastWords(uid))
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer within %s: %w%s", control, k.config.Begin, err, k.lastWords(uid))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// limitProcesses sets the daemon's limits for each process, as the claim requests.
func (k *Supervisor) limitProcesses(ctx context.Context, uid string, wanted *settings) error {
	if wanted.threads > 0 {
		if _, err := k.command(ctx, uid, fmt.Sprintf("set_default_active_thread_percentage %d", wanted.threads)); err != nil {
			return err
		}
		answer, err := k.command(ctx, uid, "get_default_active_thread_percentage")
		if err != nil {
			return err
		}
		if now, err := strconv.ParseFloat(strings.TrimSpace(answer), 64); err != nil || now > float64(wanted.threads)+0.5 {
			return fmt.Errorf("%s does not keep to %d %% of computing: it says %.80q", control, wanted.threads, answer)
		}
	}
	for _, gpu := range wanted.gpus {
		if wanted.memory > 0 {
			if _, err := k.command(ctx, uid, fmt.Sprintf("set_default_device_pinned_mem_limit %s %dM", gpu, wanted.memory)); err != nil {
				return err
			}
		}
	}
	return nil
}

// refusalTexts are words in the daemon's error messages, which have no exit status.
var refusalTexts = []string{"error", "fail", "invalid", "cannot", "unknown", "not supported"}

// command sends a command to the daemon of a claim, and returns the answer.
func (k *Supervisor) command(ctx context.Context, uid, line string) (string, error) {
	answer, err := k.runCommand(ctx, k.config.Ask, uid, line+"\n", control)
	if err != nil {
		return "", fmt.Errorf("%s: %w", line, err)
	}
	for _, refusal := range refusalTexts {
		if strings.Contains(strings.ToLower(answer), refusal) {
			return "", fmt.Errorf("%s: it says %.200q", line, strings.TrimSpace(answer))
		}
	}
	return answer, nil
}

// runCommand runs one of NVIDIA's programs for a claim to its end, and returns the output.
func (k *Supervisor) runCommand(ctx context.Context, limit time.Duration, uid, input, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.Command(name, args...) //nolint:noctx // killed below with all of its children
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = k.environment(uid), strings.NewReader(input), &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.WaitDelay = time.Second
	if err := k.run(uid, cmd); err != nil {
		return "", err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			return "", fmt.Errorf("%w: %.200q", err, strings.TrimSpace(out.String()))
		}
		return out.String(), nil
	case <-ctx.Done():
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // the process may have ended meanwhile
		<-ended                                             //nolint:errcheck // the error is that of the kill
		return "", fmt.Errorf("%s has not ended after %s: %w", name, limit, context.DeadlineExceeded)
	}
}

// lastWords returns the end of the daemon's log, for messages.
func (k *Supervisor) lastWords(uid string) string {
	data, err := os.ReadFile(filepath.Join(k.dir(uid), logs, "output.log"))
	text := strings.TrimSpace(string(data))
	if err != nil || text == "" {
		return ""
	}
	return fmt.Sprintf("; its log ends with %q", text[max(0, len(text)-200):])
}

// attendDaemon waits for the end of a daemon, and logs it unless it was intended.
func (k *Supervisor) attendDaemon(c *claim, p wire.Process, wait func()) {
	if wait == nil { // not a child of this process
		wait = func() {
			for isAlive(p) {
				time.Sleep(200 * time.Millisecond)
			}
		}
	}
	wait()
	c.set(func() {
		if c.Process == p {
			c.Process = wire.Process{}
			c.Broken = fmt.Sprintf("MPS daemon %d has ended by itself", p.PID)
			k.config.Log.Printf("claim %s: %s", c.UID, c.Broken)
		}
	})
}

// killWait limits the wait for a killed process to end: the driver has to release its GPU.
const killWait = 10 * time.Second

// quit ends all processes of a claim: the daemon and its children by the daemon's own command, then
// by signals, and an nvidia-smi that a killed program has left.
func (k *Supervisor) quit(ctx context.Context, c *claim) error {
	before := c.copy().Process
	c.set(func() { c.Process = wire.Process{} }) // its end is intended
	if isAlive(before) {
		ctx, cancel := context.WithTimeout(ctx, k.config.Quit)
		// There is no wait for clients: the claim or its daemon has ended.
		_, err := k.command(ctx, c.UID, "quit -t 1")
		for err == nil && isAlive(before) && ctx.Err() == nil {
			time.Sleep(20 * time.Millisecond)
		}
		cancel()
	}
	for _, last := range []struct {
		signal syscall.Signal
		wait   time.Duration
	}{{syscall.SIGTERM, k.config.Quit}, {syscall.SIGKILL, killWait}} {
		for limit := time.Now().Add(last.wait); time.Now().Before(limit); time.Sleep(20 * time.Millisecond) {
			if !signal(k.dir(c.UID), last.signal) {
				return k.removePipes(c.UID)
			}
		}
	}
	c.set(func() { c.Process = before })
	return fmt.Errorf("processes of the claim do not end: %v", ofClaim(k.dir(c.UID)))
}

// removePipes removes pipes of the last daemon, which the next one could take for its own.
func (k *Supervisor) removePipes(uid string) error {
	entries, err := os.ReadDir(filepath.Join(k.dir(uid), pipes))
	if err != nil {
		return nil //nolint:nilerr // there are none
	}
	for _, entry := range entries {
		if err := os.RemoveAll(filepath.Join(k.dir(uid), pipes, entry.Name())); err != nil {
			return fmt.Errorf("remove pipes: %w", err)
		}
	}
	return nil
}
