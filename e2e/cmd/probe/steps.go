package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// env prints the environment variables, except those that the runtime or the kubelet sets in every
// container.
func env(out io.Writer, environ []string) error {
	for _, variable := range slices.Sorted(slices.Values(environ)) {
		if name, _, _ := strings.Cut(variable, "="); !usualVariable(name) {
			fmt.Fprintln(out, "env", variable)
		}
	}
	return nil
}

// usualVariable reports whether the runtime sets a variable in every container, or the kubelet sets
// it for a service.
func usualVariable(name string) bool {
	return slices.Contains([]string{"PATH", "HOME", "HOSTNAME", "TERM"}, name) ||
		strings.HasPrefix(name, "KUBERNETES_") ||
		strings.HasSuffix(name, "_SERVICE_HOST") || strings.HasSuffix(name, "_SERVICE_PORT")
}

// usualDevices are the device nodes that a runtime creates in every container.
var usualDevices = []string{"console", "full", "null", "ptmx", "random", "tty", "urandom", "zero"}

// devices prints the device nodes below dir.
func devices(out io.Writer, dir string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		if entry.IsDir() && slices.Contains([]string{"pts", "shm", "mqueue"}, name) {
			return fs.SkipDir
		}
		if entry.Type()&fs.ModeDevice == 0 || slices.Contains(usualDevices, name) {
			return nil
		}
		var stat unix.Stat_t
		if err := unix.Stat(path, &stat); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		kind := "b"
		if entry.Type()&fs.ModeCharDevice != 0 {
			kind = "c"
		}
		fmt.Fprintf(out, "device %s %d:%d %04o %s\n", kind, unix.Major(stat.Rdev), unix.Minor(stat.Rdev), stat.Mode&0o7777, path)
		return nil
	})
}

// mounts prints the mounts, except those of the kernel, the runtime and the kubelet that every
// container has.
func mounts(out io.Writer) error {
	table, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	var lines []string
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line) // source, target, type, options, ...
		if len(fields) < 4 || usualMount(fields[1]) {
			continue
		}
		access, _, _ := strings.Cut(fields[3], ",")
		lines = append(lines, fmt.Sprintf("mount %s %s %s", fields[1], fields[2], access))
	}
	for _, line := range slices.Sorted(slices.Values(lines)) {
		fmt.Fprintln(out, line)
	}
	return nil
}

func usualMount(target string) bool {
	if slices.Contains([]string{"/", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/run/secrets/kubernetes.io/serviceaccount",
		"/var/run/secrets/kubernetes.io/serviceaccount", "/dev/termination-log"}, target) {
		return true
	}
	for _, dir := range []string{"/proc", "/sys", "/dev"} {
		if target == dir || strings.HasPrefix(target, dir+"/") {
			return true
		}
	}
	return false
}

// kvm prints the API version of /dev/kvm. This requires permission to open the device for reading
// and writing.
func kvm(out io.Writer) error {
	const getAPIVersion = 0xAE00 // _IO(KVMIO, 0)
	file, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	version, _, errno := unix.Syscall(unix.SYS_IOCTL, file.Fd(), getAPIVersion, 0)
	if errno != 0 {
		return fmt.Errorf("KVM_GET_API_VERSION: %w", errno)
	}
	fmt.Fprintln(out, "kvm", version)
	return nil
}

// api prints the version of the API server. It finds and authenticates the server as any client in
// a pod does.
func api(out io.Writer) error {
	const account = "/var/run/secrets/kubernetes.io/serviceaccount"
	token, err := os.ReadFile(account + "/token")
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(account + "/ca.crt")
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return errors.New("no certificate in ca.crt")
	}
	address := net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"))
	request, err := http.NewRequest(http.MethodGet, "https://"+address+"/version", nil)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+string(token))
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", address, response.Status)
	}
	var version struct{ GitVersion string }
	if err := json.NewDecoder(response.Body).Decode(&version); err != nil {
		return fmt.Errorf("answer of %s: %w", address, err)
	}
	fmt.Fprintln(out, "api", version.GitVersion)
	return nil
}

func wait(out io.Writer) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	fmt.Fprintln(out, "wait")
	<-signals
	return nil
}
