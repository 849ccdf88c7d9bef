// Command restless is a node under constant load. It starts an agent, and calls it for claims and
// devices as a kubelet does, one call after another, until the machine loses power. The command
// records its calls and their results in a journal on a separate disk, past all caches. After each
// start, it compares the agent's behaviour with the journal.
//
// The machine has eight GPUs and eight NPUs from recorded hosts. At first, the agent offers both by
// DRA. The agent must then refuse devices that were allocated earlier by the device plugin API. It
// must prepare new claims for all other devices, since the claims of earlier boots are void. After
// that, the agent offers the GPUs by the device plugin API. No pod with a GPU ever ends.
//
// The API server and the kubelet are stand-ins.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"chandler.dev/e2e/standin"
)

// resource is the extended resource of the GPUs.
const resource = "amd.com/gpu"

// patience is the time limit of each step. It is long because the machine is emulated, and because a
// device leaves DRA a minute after it was withdrawn.
const patience = 3 * time.Minute

func main() {
	var n node
	flag.StringVar(&n.agent, "agent", "", "the agent's program")
	flag.StringVar(&n.disk, "disk", "", "directory on the disk, the kubelet's")
	flag.StringVar(&n.memory, "memory", "", "directory in memory")
	journal := flag.String("journal", "", "block device of the journal")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	var err error
	if n.journal, err = openJournal(*journal); err != nil {
		fmt.Println("fault:", err)
		os.Exit(1)
	}
	if err := n.live(ctx, flag.Args()); err != nil {
		fmt.Printf("fault: %v\n%s\n", err, n.log.tail())
		os.Exit(1)
	}
}

// A node is the whole machine.
type node struct {
	agent, disk, memory string

	journal *journal
	api     standin.API
	kubelet standin.Kubelet
	log     logged // the agent's log
	ended   chan error
	calls   drapb.DRAPluginClient
}

// live starts the agent on the recorded hosts and keeps the agent busy until ctx ends.
func (n *node) live(ctx context.Context, hosts []string) error {
	if err := n.layOut(ctx, hosts); err != nil {
		return err
	}
	if err := n.checkGrants(); err != nil {
		return err
	}
	if err := n.kubelet.Serve(n.disk); err != nil {
		return err
	}
	// Only pods of earlier boots are listed. Devices that are allocated from here on are in no pod
	// list, as before a kubelet has started their pod.
	for i, id := range slices.Sorted(maps.Keys(n.journal.allocated)) {
		n.kubelet.RunPod(fmt.Sprint("pod-", i), resource, id)
	}
	if err := n.startAgent(ctx); err != nil {
		return err
	}
	fmt.Println("started")
	err := n.until(ctx, "the driver is registered", func(ctx context.Context) (err error) {
		n.calls, err = n.kubelet.Register(ctx)
		return err
	})
	if err != nil {
		return err
	}
	if err := n.check(ctx); err != nil {
		return err
	}
	n.api.Modes <- "DevicePlugin"
	err = n.until(ctx, "the GPUs are in the device-plugin API", func(context.Context) error {
		_, err := n.kubelet.Plugin(resource)
		return err
	})
	if err != nil {
		return err
	}
	fmt.Println("working")
	return n.work(ctx)
}

// layOut creates the simulated host and the agent's configuration, both in memory.
func (n *node) layOut(ctx context.Context, hosts []string) error {
	for _, dir := range []string{n.disk, n.memory} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	args := append([]string{"simulate", "--device-nodes", filepath.Join(n.memory, "host")}, hosts...)
	if out, err := exec.CommandContext(ctx, n.agent, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("lay out the host: %w: %s", err, out)
	}
	n.api.Mode, n.api.Modes = "DRA", make(chan string, 1)
	kubeconfig, err := n.api.Serve("127.0.0.1:0")
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(filepath.Join(n.memory, "kubeconfig"), []byte(kubeconfig), 0o600),
		os.WriteFile(filepath.Join(n.memory, "config.yaml"), []byte(config), 0o600))
}

// config offers the NPUs by DRA. The node's label decides which API offers the GPUs.
const config = `apiVersion: chandler.dev/v1alpha1
kind: DriverConfig
resources:
- name: habana.ai/gaudi
  mode: DRA
  cel: device.attributes["chandler.dev"].kind == "npu"
`

func (n *node) startAgent(ctx context.Context) error {
	in := func(name string) string { return filepath.Join(n.memory, name) }
	cmd := exec.CommandContext(ctx, n.agent, "run", "--kubeconfig", in("kubeconfig"), "--config", in("config.yaml"), "--node-name=node", "--pod-uid="+standin.PodUID, "--pod=default/agent",
		"--kubelet-root", n.disk, "--device-plugin-dir", filepath.Join(n.disk, "device-plugins"), "--host-root", in("host"),
		"--cdi-root", in("cdi"), "--run-dir", in("run"), "--host-files-root", in("files"), "--feature-dir=", "--web-ui-bind-address=", "--rescan-interval=1s", "-v=2")
	cmd.Stdout, cmd.Stderr = &n.log, &n.log
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	n.ended = make(chan error, 1)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the agent: %w", err)
	}
	go func() { n.ended <- cmd.Wait() }()
	return nil
}

// A last error is one after which a retry is useless.
type last struct{ error }

func (l last) Unwrap() error { return l.error }

// settled wraps an error to stop retries.
func settled(err error) error {
	if err == nil {
		return nil
	}
	return last{err}
}

// until repeats try until it succeeds, until it returns a last error, or until patience elapses.
func (n *node) until(ctx context.Context, what string, try func(context.Context) error) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		err := try(ctx)
		switch {
		case err == nil || errors.As(err, &last{}):
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(deadline):
			return fmt.Errorf("%s: not after %s: %s", what, patience, err) //nolint:errorlint // Callers must not find a refusal in this error.
		}
		select {
		case err := <-n.ended:
			return fmt.Errorf("the agent ended before %s: %w", what, err)
		default:
		}
	}
}

// checkGrants compares the file of grants, as the loss of power left it, with the journal.
func (n *node) checkGrants() error {
	data, err := os.ReadFile(filepath.Join(n.disk, "plugins/chandler.dev/grants/grants.json"))
	if errors.Is(err, fs.ErrNotExist) && len(n.journal.allocated) == 0 {
		return nil
	}
	var grants []struct {
		ID string `json:"id"`
	}
	if err == nil {
		err = json.Unmarshal(data, &grants)
	}
	if err != nil {
		return fmt.Errorf("%d grants are lost: %w", len(n.journal.allocated), err)
	}
	for id := range n.journal.allocated {
		if !slices.ContainsFunc(grants, func(g struct {
			ID string `json:"id"`
		}) bool {
			return g.ID == id
		}) {
			return fmt.Errorf("a grant is lost: %s was allocated and is not among %v", id, grants)
		}
	}
	return nil
}

// check compares the agent's allocations after a start with the journal.
func (n *node) check(ctx context.Context) error {
	for _, id := range gpus {
		asked := n.journal.claim(id, "checks")
		err := n.until(ctx, "word of what containers have", func(ctx context.Context) error { return n.prepareUnless(ctx, asked, "has not yet reported") })
		refused := &standin.Refusal{}
		switch {
		case err != nil && !errors.As(err, &refused):
			return err
		case n.journal.allocated[id] && err == nil:
			return fmt.Errorf("a grant is lost: %s was allocated, and a claim has it now", id)
		case !n.journal.allocated[id] && !n.journal.asked[id] && err != nil:
			return fmt.Errorf("%s was never asked for, and a claim cannot have it: %w", id, err)
		}
		if err == nil {
			if err := n.unprepare(ctx, asked); err != nil {
				return err
			}
		}
	}
	for _, device := range npus {
		if err := n.prepare(ctx, n.journal.claim(device, "new")); err != nil {
			return fmt.Errorf("a new claim cannot have %s: %w", device, err)
		}
	}
	for uid := range n.journal.claims { // The stand-in kubelet reports that the pods of these claims have ended.
		if err := n.unprepare(ctx, uid); err != nil {
			return fmt.Errorf("a claim of an earlier boot does not end: %w", err)
		}
	}
	for _, device := range npus {
		if err := n.unprepare(ctx, n.journal.claim(device, "new")); err != nil {
			return err
		}
	}
	return nil
}

// work prepares and unprepares claims at random, and once allocates a GPU.
func (n *node) work(ctx context.Context) error {
	random := rand.New(rand.NewPCG(uint64(n.journal.boot), uint64(time.Now().UnixNano()))) //nolint:gosec // A predictable sequence does no harm.
	has := make(map[string]string)                                                         // claims by device
	allocation := random.IntN(12)
	for number := 0; ctx.Err() == nil; number++ {
		select {
		case err := <-n.ended:
			return fmt.Errorf("the agent ended at work without an order: %w", err)
		default:
		}
		device := npus[random.IntN(len(npus))]
		switch uid := has[device]; {
		case number == allocation:
			free := slices.IndexFunc(gpus, func(id string) bool { return !n.journal.asked[id] })
			if free < 0 {
				continue
			}
			if err := n.journal.write("asked", gpus[free]); err != nil {
				return err
			}
			if err := n.allocate(ctx, gpus[free]); err != nil {
				return fmt.Errorf("allocate %s: %w", gpus[free], err)
			}
			if err := n.journal.write("allocated", gpus[free]); err != nil {
				return err
			}
		case uid != "":
			if err := n.unprepare(ctx, uid); err != nil {
				return err
			}
			delete(has, device)
		default:
			uid = n.journal.claim(device, strconv.Itoa(number))
			if err := n.journal.write("claim", uid); err != nil {
				return err
			}
			if err := n.prepare(ctx, uid); err != nil {
				return err
			}
			has[device] = uid
		}
	}
	return ctx.Err()
}

// prepareUnless prepares a claim. It returns a refusal that contains text unwrapped, so that the
// caller can retry. All other errors are last errors.
func (n *node) prepareUnless(ctx context.Context, uid, text string) error {
	err := n.prepare(ctx, uid)
	if refused := (&standin.Refusal{}); errors.As(err, &refused) && strings.Contains(refused.Error(), text) {
		return err
	}
	return settled(err)
}

func (n *node) prepare(ctx context.Context, uid string) error {
	if err := standin.Prepare(ctx, n.calls, uid); err != nil {
		return err
	}
	file := filepath.Join(n.memory, "cdi", "chandler.dev-claim_"+uid+".json")
	if _, err := os.Stat(file); err != nil {
		return fmt.Errorf("prepare %s: no CDI spec: %w", uid, err)
	}
	return nil
}

func (n *node) unprepare(ctx context.Context, uid string) error {
	return standin.Unprepare(ctx, n.calls, uid)
}

// allocate requests one GPU for a container until the allocation succeeds.
func (n *node) allocate(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := n.kubelet.Allocate(ctx, resource, id)
		if err == nil || ctx.Err() != nil {
			return err
		}
		fmt.Println("not yet:", err)
		time.Sleep(100 * time.Millisecond)
	}
}

// logged keeps the output of a process.
type logged struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logged) Write(text []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(text)
}

// tail returns the last 8000 bytes of the output.
func (l *logged) tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	text := l.text.String()
	return text[max(0, len(text)-8000):]
}
