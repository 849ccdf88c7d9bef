package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/vishvananda/netlink"
)

// Init is the main function of a machine's first process. It reads an order from in, sets up
// the machine, reports the result, and reaps processes until it is killed. For cmd/machine
// only.
func Init(in io.Reader) error {
	reports := os.NewFile(reportFD, "report")
	// Register before the setup, so that no signal during the setup is lost.
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)

	var r report
	if err := setUp(in); err != nil {
		r.Error = err.Error()
	}
	if err := errors.Join(json.NewEncoder(reports).Encode(r), reports.Close()); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	for range ended {
		reap()
	}
	return nil
}

func setUp(in io.Reader) error {
	// Mounts and the host name belong to namespaces, which all threads of this process share.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var o order
	if err := json.NewDecoder(in).Decode(&o); err != nil {
		return fmt.Errorf("read order: %w", err)
	}
	if err := layOutFiles(o.Config); err != nil {
		return fmt.Errorf("lay out files: %w", err)
	}
	if err := syscall.Sethostname([]byte(o.Config.Hostname)); err != nil {
		return fmt.Errorf("host name: %w", err)
	}
	if err := layOutNetwork(o.Config.Addresses); err != nil {
		return fmt.Errorf("lay out network: %w", err)
	}
	return forwardAll(o.Config)
}

// reap waits for all children that have ended. They are orphans of other processes.
func reap() {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid == 0 {
			return
		}
	}
}

// layOutNetwork enables the loopback interface, adds the addresses, and enables routing
// between the networks of the machine's containers. There is no route out of the machine.
func layOutNetwork(addresses []netip.Addr) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	for _, address := range addresses {
		prefix := netip.PrefixFrom(address, address.BitLen())
		addr, err := netlink.ParseAddr(prefix.String())
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(lo, addr); err != nil {
			return fmt.Errorf("address %s: %w", address, err)
		}
	}
	return write("/proc/sys/net/ipv4/ip_forward", "1")
}

// forwardAll starts forwarding for the configured addresses and for the published address.
func forwardAll(cfg Config) error {
	for from, to := range cfg.Forward {
		listener, err := net.Listen("tcp", from)
		if err != nil {
			return fmt.Errorf("forward %s: %w", from, err)
		}
		go forward(listener, to)
	}
	if cfg.Publish == "" {
		return nil
	}
	file := os.NewFile(listenerFD, "listener")
	listener, err := net.FileListener(file) // belongs to the host's network, regardless of this process's namespaces
	if err != nil {
		return fmt.Errorf("publish %s: %w", cfg.Publish, err)
	}
	_ = file.Close()
	go forward(listener, cfg.Publish)
	return nil
}

// forward connects each incoming connection to an address, for the lifetime of the machine.
func forward(listener net.Listener, to string) {
	for {
		from, err := listener.Accept()
		if err != nil {
			fmt.Fprintf(os.Stderr, "forward to %s: %v\n", to, err)
			return
		}
		go splice(from.(*net.TCPConn), to)
	}
}

// splice copies data in both directions until both ends have closed.
func splice(from *net.TCPConn, address string) {
	defer from.Close()
	conn, err := net.Dial("tcp", address)
	if err != nil { // the client's connection is closed, similar to a refusal
		return
	}
	to := conn.(*net.TCPConn)
	defer to.Close()
	back := make(chan struct{})
	go func() {
		_, _ = io.Copy(from, to)
		_ = from.CloseWrite()
		close(back)
	}()
	_, _ = io.Copy(to, from)
	_ = to.CloseWrite()
	<-back
}
