// Command fake replaces nvidia-cuda-mps-control or nvidia-smi in tests, depending on its name. Its
// behaviour, including faults, is in the file "behaviour" of its root, one word per line.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	own, err := os.Executable()
	if err != nil {
		panic(err)
	}
	root := filepath.Join(filepath.Dir(own), "../..")
	words, _ := os.ReadFile(filepath.Join(root, "behaviour"))
	behaves := func(how string) bool { return strings.Contains(string(words), how+"\n") }
	switch filepath.Base(os.Args[0]) {
	case "nvidia-smi":
		if behaves("cannot manage") {
			fmt.Println("it is not supported")
			os.Exit(3)
		}
		if behaves("may not manage") {
			fmt.Println("Insufficient Permissions")
			os.Exit(4)
		}
		if strings.Contains(strings.Join(os.Args, " "), "--query-gpu=compute_mode") {
			fmt.Println(computeMode(root, os.Args[2]))
			return
		}
		for _, arg := range os.Args {
			if behaves("may not manage " + arg) {
				fmt.Println("Insufficient Permissions")
				os.Exit(4)
			}
		}
		if behaves("sets nothing") {
			return
		}
		if behaves("hesitates") {
			_ = os.WriteFile(filepath.Join(root, "hesitating"), []byte(strconv.Itoa(os.Getpid())), 0o600)
			time.Sleep(time.Hour)
		}
		log, err := os.OpenFile(filepath.Join(root, "smi.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if errors.Is(err, syscall.EROFS) { // the root is read-only, as in a container
			log, err = os.OpenFile("/dev/smi.log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		}
		if err != nil {
			panic(err)
		}
		fmt.Fprintln(log, strings.Join(os.Args[1:], " "))
	default:
		socket := filepath.Join(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "control")
		switch strings.Join(os.Args[1:], "") {
		case "-f":
			daemon(own, socket, behaves)
		case "server":
			time.Sleep(time.Hour)
		default:
			client(socket)
		}
	}
}

// computeMode returns the last mode that was set for a GPU, in the words of the query.
func computeMode(root, gpu string) string {
	log, err := os.ReadFile(filepath.Join(root, "smi.log"))
	if inside, insideErr := os.ReadFile("/dev/smi.log"); err != nil && insideErr == nil {
		log = inside
	}
	mode := "Default"
	for line := range strings.Lines(string(log)) {
		switch strings.TrimSpace(line) {
		case "-i " + gpu + " -c DEFAULT":
			mode = "Default"
		case "-i " + gpu + " -c EXCLUSIVE_PROCESS":
			mode = "Exclusive_Process"
		}
	}
	return mode
}

// daemon is the control daemon. Like the real one, it has a server as its child, and does not start
// if another one appears to run.
func daemon(own, socket string, behaves func(string) bool) {
	if behaves("dies") {
		fmt.Println("cannot load libcuda.so.1")
		os.Exit(1)
	}
	if behaves("slow") {
		time.Sleep(2 * time.Second)
	}
	if behaves("stubborn") {
		signal.Ignore(syscall.SIGTERM)
	}
	if behaves("silent") {
		time.Sleep(time.Hour)
	}
	server := exec.Command(own, "server") //nolint:noctx // the server outlives this program
	server.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := server.Start(); err != nil {
		panic(err)
	}
	listener, err := net.Listen("unix", socket) //nolint:noctx // as above
	if err != nil {
		fmt.Println("An instance of this daemon is already running")
		os.Exit(1)
	}
	if shm := os.Getenv("CUDA_VISIBLE_DEVICES"); shm != "" {
		_ = os.WriteFile("/dev/shm/of-mps-daemon", []byte(shm), 0o600) // only where that is possible
	}
	limits := &limits{server: strconv.Itoa(server.Process.Pid), memory: make(map[string]string), threads: "100.0"}
	for {
		c, err := listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			line, _ := bufio.NewReader(c).ReadString('\n')
			switch words := strings.Fields(line); {
			case behaves("deaf"):
				time.Sleep(time.Hour)
			case len(words) == 0:
			case words[0] == "quit":
				if behaves("stubborn") {
					return
				}
				if !behaves("leaves its server") {
					_ = server.Process.Kill()
				}
				if behaves("leaves its pipe") {
					os.Exit(0)
				}
				listener.Close()
				os.Exit(0)
			case behaves("refuses") && strings.HasPrefix(words[0], "set_"):
				fmt.Fprintln(c, "Error: operation not permitted")
			default:
				fmt.Fprint(c, limits.answer(words, behaves("forgets")))
			}
		}()
	}
}

// limits are the limits for the daemon's clients.
type limits struct {
	server  string
	mu      sync.Mutex
	threads string
	memory  map[string]string
}

func (l *limits) answer(words []string, forgets bool) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch words[0] {
	case "get_server_list":
		return l.server + "\n"
	case "set_default_active_thread_percentage":
		if !forgets {
			l.threads = words[1] + ".0"
		}
		return l.threads + "\n"
	case "get_default_active_thread_percentage":
		return l.threads + "\n"
	case "set_default_device_pinned_mem_limit":
		l.memory[words[1]] = words[2]
		return ""
	case "get_default_device_pinned_mem_limit":
		return l.memory[words[1]] + "\n"
	}
	return "Unknown command\n"
}

// client passes a command to the daemon.
func client(socket string) {
	c, err := net.Dial("unix", socket) //nolint:noctx // the caller ends it
	if err != nil {
		fmt.Println("Cannot find MPS control daemon process")
		os.Exit(1)
	}
	_, _ = io.Copy(c, os.Stdin)
	_, _ = io.Copy(os.Stdout, c)
}
