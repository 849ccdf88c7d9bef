//go:build cgo

// Command chandler-host prints the facts about this host's GPUs from NVML, NVIDIA's management
// library, in the format of package facts, one line at a time. It is a separate program because
// NVML needs cgo and the C library, and may hang or crash: chandler runs the program if installed,
// ends a silent one, and works without it.
//
// With --create or --remove, the program creates or removes a MIG instance at a place in NVML's
// list, and exits. Without these flags and without --sharing-daemons, it changes nothing. To read
// facts, the program needs access to /dev/nvidia*. In watch mode, the device nodes stay open, so
// that GPUs can be reset, and the driver can be unloaded, only after the program has ended.
//
// With --sharing-daemons, the program is a separate service that outlives the agent: it runs MPS
// daemons for claims, and sets time slices; see package sharing.
//
// With --host-service, the program is a privileged service that changes and examines the host for an
// agent without privilege; see package hostservice. It loads no library. With --serve-nvml, it runs
// this program as a child process for the agent, to print the facts and to change MIG instances; with
// --serve-files, to print the driver's files. With --fpga-bitstreams, it programs FPGAs.
//
// With --files, the program uses neither GPUs nor NVML. It prints, in the format of package
// userspace, the driver files for containers, by NVIDIA's own code for CDI specs (nvcdi), which
// needs cgo too. This mode only reads files.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"chandler.dev/internal/hostservice"
)

type options struct {
	hostRoot   string
	driverRoot string
	gpus       string
	files      bool
	sharing    string

	hostService, allow string
	serveNVML          bool
	serveFiles         bool
	bitstreams         string

	interval time.Duration
	watch    bool

	again chan struct{} // requests for a scan; room for one

	gpu, create, remove, uuid string
	hasBegun                  bool
}

func main() {
	var o options
	flag.StringVar(&o.hostRoot, "host-root", "/", "`directory` of the host's files; output paths omit it")
	flag.StringVar(&o.driverRoot, "driver-root", "/", "`directory` of the host with the driver's libraries; if it has no NVML, the system's NVML is used")
	flag.BoolVar(&o.files, "files", false, "print the files of the driver that containers need, without NVML")
	flag.StringVar(&o.sharing, "sharing-daemons", "", "run MPS daemons and set time slices for claims, by requests of the agent to a socket in this `directory`, with the programs of --driver-root")
	flag.StringVar(&o.hostService, "host-service", "", "write attributes of --host-root and find the users of devices, by requests of the agent to a socket in this `directory`")
	flag.StringVar(&o.allow, "allow", "", "the `attributes` that --host-service may write, with commas, of "+strings.Join(hostservice.ListAttributes(), ", "))
	flag.BoolVar(&o.serveNVML, "serve-nvml", false, "with --host-service, also run this program for the agent, to print facts from NVML and to create and remove MIG instances, with --driver-root, --gpus and --interval")
	flag.BoolVar(&o.serveFiles, "serve-files", false, "with --host-service, also run this program with --files for the agent, with --driver-root")
	flag.StringVar(&o.bitstreams, "fpga-bitstreams", "", "with --host-service, also program Intel FPGAs for claims, with bitstreams from this `directory` of the host")
	flag.StringVar(&o.gpus, "gpus", "/proc/driver/nvidia/gpus", "`directory` that lists the GPUs by their PCI addresses")
	flag.DurationVar(&o.interval, "interval", 10*time.Second, "time to wait for GPU errors between scans; with --files, the time limit")
	flag.BoolVar(&o.watch, "watch", false, "run until standard input is closed, and scan again at each line")
	flag.StringVar(&o.create, "create", "", "create a MIG instance at a `place` of the GPU, such as 1g.10gb@4, with its device nodes, print it, and exit; an existing instance is not an error")
	flag.StringVar(&o.remove, "remove", "", "remove the MIG instance at a `place` of the GPU, and exit; a missing instance is not an error")
	flag.StringVar(&o.gpu, "gpu", "", "the PCI `address` of the GPU to change")
	flag.StringVar(&o.uuid, "uuid", "", "remove the instance only if this is its `UUID`")
	flag.BoolVar(&o.hasBegun, "begun", false, "the caller has started to create or remove the instance, so finish this; otherwise, a GPU instance without a compute instance belongs to another program")
	renamed(flag.CommandLine, "upkeep", "sharing-daemons")
	renamed(flag.CommandLine, "cut", "create")
	flag.Parse()
	o.again = make(chan struct{}, 1)
	done := make(chan error, 2)
	run := o.run
	switch {
	case o.files:
		run = o.runUserspace
	case o.sharing != "":
		run = o.runSharing
	case o.hostService != "":
		run = o.runHostService
	}
	go func() { done <- run(os.Stdout) }()
	if o.watch {
		// a call of NVML may never return, and the parent process may be gone
		go func() { done <- o.readRequests(os.Stdin) }()
	}
	if err := <-done; err != nil {
		fmt.Fprintln(os.Stderr, "chandler-host:", err)
		os.Exit(1)
	}
}

// renamed makes the previous name of a flag an error that contains the present name.
func renamed(flags *flag.FlagSet, previous, name string) {
	flags.Func(previous, "renamed to --"+name, func(string) error { return fmt.Errorf("the flag was renamed to --%s", name) })
}

func (o *options) run(out io.Writer) error {
	lib := o.load()
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return o.refuseCreation(out, fmt.Errorf("load NVML: %s", describeReturn(ret)))
	}
	if o.create != "" || o.remove != "" {
		return o.changeInstance(lib, out, os.Stderr)
	}
	addresses, err := listGPUs(o.gpus)
	if err != nil {
		return err
	}
	r, err := newReader(lib, addresses)
	if err != nil {
		return err
	}
	if !o.watch {
		return r.write(out)
	}
	return r.watchGPUs(out, o)
}

// readRequests requests a scan after each line, until the end of the input.
func (o *options) readRequests(in io.Reader) error {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		select {
		case o.again <- struct{}{}:
		default:
		}
	}
	return lines.Err()
}

// libraryDirs are the directories of the driver's libraries in distributions, and with the
// installers of NVIDIA and Google.
var libraryDirs = []string{
	"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu",
	"lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu",
}

const libraryName = "libnvidia-ml.so.1"

// libraryPath returns the path of NVML below a root, or only its name, with which the dynamic
// linker searches the system's directories.
func libraryPath(root string) string {
	for _, dir := range libraryDirs {
		file := filepath.Join(root, dir, libraryName)
		if _, err := os.Stat(file); err == nil {
			return file
		}
	}
	return libraryName
}

// listGPUs returns the PCI addresses of the kernel driver's GPUs.
func listGPUs(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, errors.New("list GPUs: NVIDIA's kernel driver is not loaded")
	}
	if err != nil {
		return nil, fmt.Errorf("list GPUs: %w", err)
	}
	addresses := make([]string, len(entries))
	for i, entry := range entries {
		addresses[i] = entry.Name()
	}
	return addresses, nil
}

// describeReturn explains a return value of NVML, for values of NVML itself by NVML's own texts.
func describeReturn(ret nvml.Return) string {
	switch ret {
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return "there is no " + libraryName + " that can be loaded"
	case nvml.ERROR_NO_PERMISSION:
		return "/dev/nvidia* cannot be opened: permission denied"
	}
	return fmt.Sprintf("%s (%d)", nvml.ErrorString(ret), ret)
}
