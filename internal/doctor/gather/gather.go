// Package gather gathers the facts that package doctor judges. It reads the host's files,
// connects to the kubelet's sockets, and queries the API server and the agent. It changes
// nothing. Each step has a deadline, so a step that hangs does not block the others.
package gather

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"chandler.dev/internal/doctor"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
)

// Patience is the time limit of each step.
const Patience = 10 * time.Second

// Options determine which node to examine and where its files are.
type Options struct {
	Node, Version string
	HostFS        fs.FS  // the host's /sys, /proc and /dev
	Root          string // the root of the node's other files, such as /etc; "" if they are not accessible
	Proc          string // the proc directory with the host's processes: /proc, or /host/proc in a pod
	Self          string // the proc directory with this process and its siblings: /proc
	HostRoot      string // the directory of a [report.Copy]
	Source        string // [report.Recording] or [report.Copy] if HostFS is one, "" for a node
	HasProc       bool   // the kernel's own proc is mounted on the host's /proc
	Simulated     bool   // HostFS is a simulated host, which has no kernel

	KubeletRoot, PluginDir, StateDir, CDIDir string

	// Only lists the categories whose facts are needed; if empty, all are needed. It limits the
	// requests to the API server, which many nodes query at once if each runs doctor periodically.
	Only []codes.Category

	// AllNodes also gathers the slices and the claims of the whole cluster, for the checks of claims
	// that wait for a device.
	AllNodes bool

	// Agent is the address of the agent's health checks; if empty, All determines the address.
	Agent string

	// Connect returns the configuration for the API server, or an error with the reason why none
	// is available.
	Connect func() (*rest.Config, error)
}

// needs reports whether the facts of one of the categories are needed.
func (o *Options) needs(categories ...codes.Category) bool {
	return len(o.Only) == 0 || slices.ContainsFunc(categories, func(c codes.Category) bool { return slices.Contains(o.Only, c) })
}

// All gathers all facts except those about devices, which the caller adds.
func All(ctx context.Context, o Options) *doctor.Facts {
	f := &doctor.Facts{Head: report.Head{Node: o.Node, Version: o.Version, Time: time.Now(), Source: o.Source, HostRoot: o.HostRoot}}
	f.Host = gatherHost(ctx, o)
	f.Kubelet.Root, f.Kubelet.PluginDir, f.Runtime.Dir = o.KubeletRoot, o.PluginDir, o.CDIDir
	if root := strings.TrimRight(o.Root, "/"); root != "" {
		f.Runtime.Dir = strings.TrimPrefix(o.CDIDir, root) // the path as seen by the container runtime
	}
	if o.Source != "" {
		return f
	}
	processes := processesOf(o.Proc)
	if !hasKubelet(o, processes) {
		f.NoKubelet = "no kubelet runs on this machine"
		if len(named(processes, "kubelet")) > 0 {
			f.NoKubelet = "a kubelet runs, but this user lacks the permission to check it: run doctor as root"
			f.Kubernetes = doctor.UnknownVersion
		}
	}
	config, err := o.Connect()
	if err != nil {
		f.NoCluster = err.Error()
	}
	if f.NoKubelet != "" && err != nil {
		return f
	}
	if err == nil {
		gatherCluster(ctx, o, config, f)
	}
	if f.NoKubelet == "" {
		if f.Kubernetes == "" {
			f.Kubernetes = doctor.UnknownVersion
		}
		gatherKubelet(ctx, o, processes, f)
		containerRuntime(ctx, o, processes, f)
		gatherAgent(ctx, o, processes, f)
	}
	return f
}

// hasKubelet reports whether the node has or had a kubelet.
func hasKubelet(o Options, processes []process) bool {
	for _, dir := range []string{o.PluginDir, filepath.Join(o.KubeletRoot, "pod-resources"), o.StateDir} {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			return true
		}
	}
	return slices.ContainsFunc(named(processes, "kubelet"), func(p process) bool { return p.ours })
}

// withPatience runs a step that may never return, such as a read from a device that hangs. After
// Patience, withPatience returns without waiting for the step's goroutine.
func withPatience[T any](ctx context.Context, what string, step func() (T, error)) doctor.Answer[T] {
	type outcome struct {
		value T
		err   error
	}
	done := make(chan outcome, 1)
	go func() {
		value, err := step()
		done <- outcome{value, err}
	}()
	timer := time.NewTimer(Patience)
	defer timer.Stop()
	select {
	case o := <-done:
		return doctor.AnswerOf(o.value, o.err)
	case <-timer.C:
		return doctor.UnknownAnswer[T](fmt.Sprintf("%s does not respond within %s", what, Patience))
	case <-ctx.Done():
		return doctor.UnknownAnswer[T](ctx.Err().Error())
	}
}
