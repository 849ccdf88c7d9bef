package gather

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"

	"chandler.dev/internal/doctor"
	"chandler.dev/internal/ledger/allocation"
)

func selfReview() *authenticationv1.SelfSubjectReview { return &authenticationv1.SelfSubjectReview{} }

// findAgents returns the agent processes. In the agent's own pod, these are the pod's processes
// alone, not other agents of the host.
func findAgents(o Options) (found []process) {
	if found = agentsOf(o, o.Self); len(found) > 0 || o.Proc == o.Self {
		return found
	}
	return agentsOf(o, o.Proc)
}

// agentsOf returns the processes of this node's agents in a proc directory.
func agentsOf(o Options, proc string) (found []process) {
	for _, p := range processesOf(proc) {
		if filepath.Base(p.args[0]) == "chandler" && len(p.args) > 1 && p.args[1] == "run" && p.isOf(o) {
			found = append(found, p)
		}
	}
	return found
}

// installations returns the DaemonSets of the node's agents, as namespace/name. The manifests
// give each agent the namespace and name of its pod as environment variables. The DaemonSet's
// name is the pod's name without the last word.
func installations(o Options) (found []string) {
	for _, p := range agentsOf(o, o.Proc) {
		variables := p.environment()
		namespace, pod := variables["POD_NAMESPACE"], variables["POD_NAME"]
		end := strings.LastIndex(pod, "-")
		if namespace == "" || end < 0 {
			continue
		}
		if name := namespace + "/" + pod[:end]; !slices.Contains(found, name) {
			found = append(found, name)
		}
	}
	slices.Sort(found)
	return found
}

// isOf reports whether an agent process belongs to the node. If several nodes run on one
// machine, each agent has a different kubelet directory or a different root.
func (p process) isOf(o Options) bool {
	flags := p.flags()
	if name := flags["node-name"]; name != "" && name != o.Node {
		return false
	}
	root := flags["kubelet-root"]
	if root == "" {
		root = "/var/lib/kubelet"
	}
	return sameFile(filepath.Join(p.dir, "root", root), o.KubeletRoot)
}

// removedDirs returns the directories of the node that were removed while the agent has them
// mounted. Such an agent continues to see the removed directory, and does not see a directory
// that was created at the same path later.
func removedDirs(o Options, agents []process) (dirs []string) {
	for _, dir := range []string{o.PluginDir, filepath.Join(o.KubeletRoot, "plugins"), filepath.Join(o.KubeletRoot, "plugins_registry"), filepath.Join(o.KubeletRoot, "pod-resources"), o.CDIDir} {
		if slices.ContainsFunc(agents, func(p process) bool {
			var s unix.Stat_t
			return unix.Stat(filepath.Join(p.dir, "root", dir), &s) == nil && s.Nlink == 0
		}) {
			dirs = append(dirs, filepath.Clean(dir))
		}
	}
	return dirs
}

// sameFile reports whether two kubelet roots are the same directory, by their plugins
// subdirectories. It also reports true if a permission or a missing plugins directory of b
// prevents the comparison. For other errors it compares the ends of the paths.
func sameFile(a, b string) bool {
	one, err := os.Stat(filepath.Join(a, "plugins"))
	if err != nil {
		return errors.Is(err, fs.ErrPermission) || strings.HasSuffix(filepath.Clean(a), filepath.Clean(b))
	}
	other, err := os.Stat(filepath.Join(b, "plugins"))
	return err != nil || os.SameFile(one, other)
}

// OwnFlags returns the flags of the agent in whose pod this process runs, or nil outside an
// agent's pod.
func OwnFlags() map[string]string {
	for _, p := range processesOf("/proc") {
		if p.pid == 1 && filepath.Base(p.args[0]) == "chandler" && len(p.args) > 1 && p.args[1] == "run" {
			return p.flags()
		}
	}
	return nil
}

func gatherAgent(ctx context.Context, o Options, processes []process, f *doctor.Facts) {
	a := &f.Agent
	found := findAgents(o)
	switch {
	case len(found) > 0:
		a.Running = doctor.KnownAnswer(true)
	case len(processes) == 0:
		a.Running = doctor.UnknownAnswer[bool]("the processes of the host are not visible from here")
	default:
		a.Running = doctor.KnownAnswer(false)
	}
	a.Installations = installations(o)
	a.Visibility, a.VisibilityAll = visibility(ctx, o, found)
	gone := withPatience(ctx, "the agent's directories", func() ([]string, error) { return removedDirs(o, found), nil })
	a.Removed = gone.Value
	a.Records = withPatience(ctx, "the agent's records", func() (doctor.Records, error) { return readRecords(o) })
	askBeside(ctx, a)
	address := o.Agent
	if address == "" {
		address = addressOf(o, found, f)
	}
	if address == "" {
		return
	}
	a.Local = strings.HasPrefix(address, "127.0.0.1:") || strings.HasPrefix(address, "localhost:")
	var all sync.WaitGroup
	all.Go(func() {
		said, header, err := probeHealth(ctx, address, "/readyz")
		a.Ready, a.Unready = doctor.AnswerOf(said, err), doctor.UnreadyReason(header.Get(doctor.UnreadyHeader))
	})
	all.Go(func() {
		said, header, err := probeHealth(ctx, address, "/healthz")
		a.Live = doctor.AnswerOf(said, err)
		if version, named := strings.CutPrefix(header.Get("Server"), doctor.ServerName); named { // older agents do not send a version
			a.Version = version
		}
	})
	all.Go(func() {
		said, err := metricsOf(ctx, address)
		a.Features, a.Refused, a.Outdated, a.ModeUnwanted = doctor.AnswerOf(said.features, err), said.refused, said.outdated, said.unwanted
	})
	all.Wait()
}

// askBeside requests /readyz from the other agents on the node that are not ready, and records
// their answers. It skips agents without a reachable probe port.
func askBeside(ctx context.Context, a *doctor.AgentFacts) {
	var all sync.WaitGroup
	defer all.Wait()
	for i := range a.OtherAgents {
		other := &a.OtherAgents[i]
		port := probePort(other.Pod)
		if other.Pod.Status.PodIP == "" || port == "" || isReady(other.Pod) {
			continue
		}
		all.Go(func() {
			if why, header, err := probeHealth(ctx, net.JoinHostPort(other.Pod.Status.PodIP, port), "/readyz"); err == nil {
				other.Why, other.Unready = why, doctor.UnreadyReason(header.Get(doctor.UnreadyHeader))
			}
		})
	}
}

// probePort returns the port of an agent's health checks, or "" if the pod declares none.
func probePort(pod *corev1.Pod) string {
	for _, c := range pod.Spec.Containers {
		for _, p := range c.Ports {
			if p.Name == "http" {
				return strconv.Itoa(int(p.ContainerPort))
			}
		}
	}
	return ""
}

// addressOf returns the address of the agent's health checks, or "" if the address cannot be
// determined. The agent's flag contains the port, and possibly the host. Otherwise the host is
// localhost within the agent's pod or network namespace, and the pod's IP elsewhere.
func addressOf(o Options, found []process, f *doctor.Facts) string {
	if len(found) == 0 {
		return ""
	}
	host, port, err := net.SplitHostPort(found[0].flags()["healthz-bind-address"])
	if err != nil {
		return ""
	}
	own, _ := os.Readlink(filepath.Join(o.Self, "self/ns/net"))
	its, _ := os.Readlink(filepath.Join(found[0].dir, "ns/net"))
	switch pod := f.Agent.Pod.Value; {
	case host != "" && host != "0.0.0.0" && host != "::":
	case own == its && own != "" || found[0].pid == 1:
		host = "127.0.0.1"
	case pod != nil && pod.Status.PodIP != "":
		host = pod.Status.PodIP
	default:
		return ""
	}
	return net.JoinHostPort(host, port)
}

// probeHealth requests a health check. It returns "" for a healthy agent and the response body
// otherwise, and the header of the response.
func probeHealth(ctx context.Context, address, path string) (said string, header http.Header, err error) {
	status, header, body, err := get(ctx, address, path)
	if err != nil {
		return "", nil, err
	}
	if status == http.StatusOK {
		return "", header, nil
	}
	return strings.TrimSpace(string(body)), header, nil
}

// probePatience is how long an agent may take to answer a probe. The agent's own check of its
// sockets takes up to three seconds.
const probePatience = 4 * time.Second

func get(ctx context.Context, address, path string) (status int, header http.Header, body []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, probePatience)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, nil)
	if err != nil {
		return 0, nil, nil, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, nil, nil, err
	}
	defer answer.Body.Close()
	body, err = io.ReadAll(io.LimitReader(answer.Body, 4<<20))
	return answer.StatusCode, answer.Header, body, err
}

// metered holds the values read from the agent's metrics.
type metered struct {
	features map[string]bool // features of the API server, and whether the server supports them
	refused  bool            // the last configuration read was invalid, and an earlier one is in effect
	unwanted bool            // the API server rejects the ResourceSlices
	outdated bool            // a configuration change takes effect at the agent's next start
}

func metricsOf(ctx context.Context, address string) (says metered, err error) {
	status, _, body, err := get(ctx, address, "/metrics")
	if err != nil {
		return says, err
	}
	if status == http.StatusNotFound {
		return says, errors.New("the agent's metrics are protected")
	}
	if status != http.StatusOK {
		return says, fmt.Errorf("the agent's metrics: %s", http.StatusText(status))
	}
	says.features = make(map[string]bool)
	for line := range strings.Lines(string(body)) {
		says.refused = says.refused || strings.TrimSpace(line) == "chandler_config_last_reload_successful 0"
		says.unwanted = says.unwanted || strings.TrimSpace(line) == "chandler_dra_slices_refused 1"
		says.outdated = says.outdated || strings.TrimSpace(line) == "chandler_config_restart_needed 1"
		rest, found := strings.CutPrefix(line, `chandler_dra_server_feature_enabled{feature="`)
		name, value, cut := strings.Cut(rest, `"} `)
		if !found || !cut {
			continue
		}
		kept, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		says.features[name] = err == nil && kept == 1
	}
	return says, nil
}

// readRecords reads the agent's allocation records.
func readRecords(o Options) (r doctor.Records, err error) {
	dir := os.DirFS(o.StateDir)
	if _, err := fs.Stat(dir, "."); err != nil {
		return r, err
	}
	boot, _ := fs.ReadFile(o.HostFS, "proc/sys/kernel/random/boot_id")
	now := strings.TrimSpace(string(boot))
	entries, err := allocation.ReadEntries(dir, ".", "")
	for _, e := range entries {
		switch e := e.(type) {
		case *allocation.Claim:
			if e.UID == "" {
				continue // the file is damaged
			}
			r.Claims = append(r.Claims, doctor.Record{UID: string(e.UID), Namespace: e.Namespace, Name: e.Name, Past: now != "" && e.Boot != now})
		case *allocation.Grant:
			r.Grants++
		}
	}
	addSetAside(o.StateDir, ".", &r)
	addSetAside(o.StateDir, "claims", &r)
	addSetAside(o.StateDir, "grants", &r)
	for _, err := range split(err) {
		if record, is := errors.AsType[*allocation.RecordError](err); !is || !isBad(record.File) {
			r.Unread = append(r.Unread, err.Error())
		}
	}
	return r, addNewer(o.StateDir, &r)
}

// split returns the errors joined in err.
func split(err error) []error {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok { //nolint:errorlint // only err itself, not an error that it wraps
		var all []error
		for _, err := range joined.Unwrap() {
			all = append(all, split(err)...)
		}
		return all
	}
	return []error{err}
}

// isBad reports whether an agent has set aside the file of a claim that it could not read.
func isBad(name string) bool {
	return strings.HasPrefix(filepath.Ext(name), allocation.BadExtension)
}

// addSetAside adds to r the files in a directory that an agent has set aside.
func addSetAside(stateDir, dir string, r *doctor.Records) {
	entries, _ := os.ReadDir(filepath.Join(stateDir, dir))
	for _, entry := range entries {
		name := entry.Name()
		if isBad(name) && dir == allocation.ClaimsDir || filepath.Ext(name) == ".unreadable" {
			r.SetAside = append(r.SetAside, filepath.Join(stateDir, dir, name))
		}
	}
}

// addNewer adds to r the records that only a newer agent may act on. A record is a line with a
// checksum, followed by JSON that contains the oldest version able to read the record.
func addNewer(stateDir string, r *doctor.Records) error {
	dir := filepath.Join(stateDir, "claims")
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, entry := range entries {
		name := filepath.Join(dir, entry.Name())
		data, err := os.ReadFile(name)
		if err != nil {
			continue // records has already reported this error
		}
		_, body, _ := bytes.Cut(data, []byte("\n"))
		var says struct{ Version, ReadableBy int }
		if json.Unmarshal(body, &says) != nil {
			continue
		}
		if says.ReadableBy == 0 {
			says.ReadableBy = says.Version
		}
		if says.ReadableBy > allocation.Version {
			r.Newer = append(r.Newer, name)
		}
	}
	return err
}

// WaitFor calls look every two seconds until look returns true or limit has passed.
func WaitFor(ctx context.Context, limit time.Duration, look func() bool) {
	end := time.Now().Add(limit)
	for !look() && time.Now().Add(time.Second).Before(end) && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-time.After(2 * time.Second):
		}
	}
}
