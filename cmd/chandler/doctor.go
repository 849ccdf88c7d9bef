package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/settings"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/internal/command"
	"chandler.dev/internal/doctor"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/gather"
	"chandler.dev/internal/doctor/report"
	"chandler.dev/internal/terminal"
)

type doctorOptions struct {
	hostRoot        string
	nodeRoot        string
	runtimeRoot     string
	kubeletRoot     string
	devicePluginDir string
	cdiRoot         string
	config          string
	kubeconfig      string
	agent           string
	node            v1alpha1.Node

	only     string
	allNodes bool
	wait     time.Duration
	quiet    bool
	strict   bool
	ascii    bool
	output   string
}

func newDoctorCommand() *cobra.Command {
	var o doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor [RECORDED.host]",
		Short: "Check this node and print faults with their remedies",
		Long: `Check this node and print faults with their remedies. Each check prints one line.
A fault has a code, a cause, and the commands that fix it; "chandler explain CODE"
describes it in detail. A check that could not run prints the reason.

Run the command on a node as root, or in the agent's pod, where it uses the agent's
options. For a host recording, or a directory with the files of another host, it
checks the devices and the host. It changes nothing.

The exit code is 0 without faults, 1 with faults (with --strict also with
warnings), and 2 if doctor itself could not run.`,
		Example: `  sudo chandler doctor
  kubectl -n chandler exec daemonset/chandler -- /chandler doctor
  chandler doctor --only devices,host
  chandler doctor --wait 60s --quiet
  chandler doctor rack7.host -o json`,
		Args:    cobra.MaximumNArgs(1),
		PreRunE: settings.OneHost,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.inheritOptions(cmd.Flags(), gather.OwnFlags())
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), args)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.only, "only", "", "check only these `categories`: kubelet, runtime, devices, host, apis, cluster, agent")
	flags.BoolVar(&o.allNodes, "all-nodes", false, "also check the claims that wait for a device, with the claims and ResourceSlices of the whole cluster, which may be large")
	flags.DurationVar(&o.wait, "wait", 0, "repeat the checks until there is no fault, up to this time")
	flags.BoolVar(&o.quiet, "quiet", false, "print only faults and warnings")
	flags.BoolVar(&o.strict, "strict", false, "count warnings as faults")
	flags.BoolVar(&o.ascii, "ascii", false, "print only ASCII characters")
	flags.StringVarP(&o.output, "output", "o", "text", "text, json, or npd for node-problem-detector")
	flags.StringVar(&o.hostRoot, "host-root", "/", "`directory` with the host's /sys, /proc and /dev")
	flags.StringVar(&o.nodeRoot, "node-root", "/", "`directory` with the node's /etc, for the configurations of kubelet and container runtime; empty if there is none")
	flags.StringVar(&o.runtimeRoot, "runtime-root", "/", "`directory` of the host's /dev for the container runtime; not / for a simulated host")
	flags.StringVar(&o.kubeletRoot, "kubelet-root", defaultKubeletRoot, "the kubelet's `directory`, its --root-dir")
	flags.StringVar(&o.devicePluginDir, "device-plugin-dir", pluginapi.DevicePluginPath, "the kubelet's device-plugins `directory`, which does not depend on the kubelet's --root-dir")
	flags.StringVar(&o.cdiRoot, "cdi-root", "/var/run/cdi", "`directory` in which the agent writes CDI specs")
	flags.StringVar(&o.config, "config", "", "DriverConfig `file` of the agent; by default, the agent's copy")
	flags.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig `file` for the API server; optional in a pod, and on a node with /etc/kubernetes/admin.conf or kubelet.conf")
	flags.StringVar(&o.agent, "agent", "", "`address` of the agent's health checks, such as 10.0.0.7:8080; by default, it is detected")
	settings.NodeFlags(flags, &o.node)
	return cmd
}

// inheritOptions copies the agent's options for unset flags, if this process runs in the agent's
// pod.
func (o *doctorOptions) inheritOptions(flags *pflag.FlagSet, own map[string]string) {
	if own == nil {
		return
	}
	inheritFlags(flags, own, "host-root", "runtime-root", "kubelet-root", "device-plugin-dir", "cdi-root", "config", "kubeconfig", "node-name")
	if !flags.Changed("node-root") {
		o.nodeRoot = "" // the pod has its own /etc
	}
}

// places lists the agent's options with directories and the node name.
var places = []string{"host-root", "kubelet-root", "device-plugin-dir", "node-name"}

// inheritFlags sets flags to the options of the agent in the same pod, unless the user has set
// them.
func inheritFlags(flags *pflag.FlagSet, own map[string]string, names ...string) {
	for _, name := range names {
		if value := own[name]; value != "" && flags.Lookup(name) != nil && !flags.Changed(name) {
			_ = flags.Set(name, value)
		}
	}
}

// couldNot returns the error of a doctor run without a result.
func couldNot(err error) error {
	if err == nil {
		return nil
	}
	return command.WithExitCode(err, 2)
}

// run checks the node and prints the report. For node-problem-detector, it also prints why the
// check was impossible.
func (o *doctorOptions) run(ctx context.Context, out, errOut io.Writer, args []string) error {
	err := o.runDoctor(ctx, out, errOut, args)
	if o.output == "npd" && err != nil && command.ExitCode(err) == 2 {
		fmt.Fprintln(out, report.Cut(err.Error(), report.LineLimit))
	}
	return err
}

func (o *doctorOptions) runDoctor(ctx context.Context, out, errOut io.Writer, args []string) error {
	only, err := codes.ParseCategories(o.only)
	if err != nil {
		return couldNot(err)
	}
	if o.output != "text" && o.output != "json" && o.output != "npd" {
		return couldNot(fmt.Errorf("output format %q: want text, json or npd", o.output))
	}
	if o.wait < 0 {
		return couldNot(fmt.Errorf("--wait %s: want a time that is not negative", o.wait))
	}
	if o.node.Name, err = settings.HostOf(args, o.hostRoot).NodeName(o.node.Name); err != nil {
		return couldNot(err)
	}
	var report *report.Report
	gather.WaitFor(ctx, o.wait, func() bool {
		if report, err = o.examineNode(ctx, errOut, args, only); err != nil {
			return true
		}
		return report.IsHealthy(o.strict)
	})
	if err != nil {
		return couldNot(err)
	}
	if err := o.print(out, report); err != nil {
		return couldNot(err)
	}
	if !report.IsHealthy(o.strict) {
		return command.WithExitCode(errors.New(""), 1) // the report has the details
	}
	return nil
}

func (o *doctorOptions) print(out io.Writer, report *report.Report) error {
	if o.output == "npd" {
		_, err := fmt.Fprintln(out, report.Line(o.strict))
		return err
	}
	if o.output == "text" {
		return report.Print(out, terminal.StyleOf(out, os.LookupEnv, o.ascii), o.quiet)
	}
	data, err := json.Marshal(report)
	if err != nil {
		return err
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, data, "", "  "); err != nil {
		return err
	}
	indented.WriteByte('\n')
	_, err = indented.WriteTo(out)
	return err
}

// examineNode gathers the facts and judges them.
func (o *doctorOptions) examineNode(ctx context.Context, errOut io.Writer, args []string, only []codes.Category) (*report.Report, error) {
	gathering := gather.Options{
		Node: o.node.Name, Version: buildVersion(), Root: o.nodeRoot, Self: "/proc", Proc: filepath.Join(o.hostRoot, "proc"),
		KubeletRoot: o.kubeletRoot, PluginDir: o.devicePluginDir, CDIDir: o.cdiRoot,
		StateDir: filepath.Join(o.kubeletRoot, stateDir), Agent: o.agent, Connect: o.connect, Only: only, AllNodes: o.allNodes,
	}
	if o.runtimeRoot != "/" {
		gathering.Proc, gathering.Simulated = "/proc", true
	}
	if len(args) == 1 {
		recorded, err := readRecorded(args[0])
		if err != nil {
			return nil, err
		}
		gathering.HostFS, gathering.Source = recorded.FS(), report.Recording
		gathering.Node = filepath.Base(args[0])
	} else {
		var err error
		if gathering.HostFS, err = settings.OpenHostRoot(o.hostRoot); err != nil {
			return nil, err
		}
		gathering.HasProc = hostfs.HasProc(gathering.HostFS)
		if !gathering.Simulated && !gathering.HasProc && !hostfs.HasSys(gathering.HostFS) {
			gathering.Source, gathering.HostRoot = report.Copy, o.hostRoot
		}
	}
	facts := gather.All(ctx, gathering)
	if err := o.addDevices(ctx, errOut, gathering, facts); err != nil {
		return nil, err
	}
	return doctor.JudgeFacts(facts, only...), nil
}

// connect returns a client configuration for the API server, from the first source that exists: the
// flag, the pod, an administrator's kubeconfig, or the kubelet's. On a machine without a kubelet,
// only the flag and the pod are considered, so that doctor does not query an unrelated cluster.
func (o *doctorOptions) connect() (*rest.Config, error) {
	if o.kubeconfig != "" {
		return loadKubeconfig(o.kubeconfig)
	}
	config, err := rest.InClusterConfig()
	if err == nil || !errors.Is(err, rest.ErrNotInCluster) {
		return config, err
	}
	for _, file := range []string{os.Getenv("KUBECONFIG"), "/etc/kubernetes/admin.conf", "/etc/kubernetes/kubelet.conf"} {
		if _, err := os.Stat(o.devicePluginDir); err != nil {
			break
		}
		if _, err := os.Stat(file); file != "" && err == nil {
			return loadKubeconfig(file)
		}
	}
	return nil, errors.New("the API server is unknown: set --kubeconfig")
}
