package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"strings"

	"github.com/spf13/cobra"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/internal/compile"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/provision"
	"chandler.dev/legacy"
)

type provisionOptions struct {
	config          string
	dryRun          bool
	hostRoot        string
	kubeletRoot     string
	devicePluginDir string
}

func newProvisionCommand() *cobra.Command {
	var o provisionOptions
	cmd := &cobra.Command{
		Use:   "provision --config FILE",
		Short: "Create virtual functions, bind drivers, set up QAT services and work queues",
		Long: `Make the PCI functions of this host as a ProvisionConfig says: create SR-IOV virtual
functions, bind functions to a driver such as vfio-pci, choose the services of
Intel QAT, and lay out the work queues of Intel DSA and IAA. Nothing else of
Chandler does any of that; it happens when this command is run, and once.

It prints a line for each change, with the old and the new value, or "nothing to
do" if all is as it should be. It does not touch functions that no rule selects,
and undoes nothing because you removed a rule.

It refuses to touch a function in use: one with a disk that is mounted, in
whichever mount namespace, that is swap or part of something, such as LVM or a
loop device, or that the kernel exports; with an interface that a route of the
host leads through; with a device node that a process has open, by whatever name;
or that a container has by a claim or by the device-plugin API. It refuses to
unbind one whose interface is up, and to destroy virtual functions that a driver
is bound to. A function of which it cannot tell counts as in use. It goes on after
a function that it refuses or cannot change, and the exit code then is not 0.

You can run it again at any time: it does what is left. If it is killed, the next
command first puts back what must not stay, which /run/chandler/provision.json
says, such as sriov_drivers_autoprobe. Only one command runs at a time.

It needs root, the host's processes in /proc, and the wanted drivers loaded.`,
		Example: `  chandler provision --config provision.yaml --dry-run
  sudo chandler provision --config provision.yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.Context(), cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&o.config, "config", "", "ProvisionConfig `file`, or - for standard input")
	cmd.Flags().BoolVar(&o.dryRun, "dry-run", false, "print the changes, and write nothing")
	cmd.Flags().StringVar(&o.hostRoot, "host-root", "/", "`directory` that holds the host's /sys, /proc and /dev")
	cmd.Flags().StringVar(&o.kubeletRoot, "kubelet-root", "/var/lib/kubelet", "the kubelet's `directory` on the host, its --root-dir, below --host-root")
	cmd.Flags().StringVar(&o.devicePluginDir, "device-plugin-dir", pluginapi.DevicePluginPath, "the kubelet's device-plugins `directory`, which is here whatever its --root-dir, below --host-root")
	_ = cmd.MarkFlagRequired("config") // the flag exists
	return cmd
}

func (o *provisionOptions) run(ctx context.Context, out io.Writer) error {
	wanted, err := loadProvisionConfig(o.config)
	if err != nil {
		return err
	}
	hostFS, err := hostfs.Open(o.hostRoot)
	if err != nil {
		return err
	}
	host := &discovery.Host{FS: hostFS}
	p := &provision.Provisioner{
		Host:     host,
		Families: families.All,
		Rules:    wanted,
		Held:     func(known []discovery.Device) (map[string]string, error) { return o.held(host, known) },
		Out:      out,
	}
	if !o.dryRun {
		journal, err := provision.OpenJournal(o.hostRoot)
		if err != nil {
			return err
		}
		defer journal.Close()
		p.Keep = journal.Keep
		if p.Write, err = provision.Writer(o.hostRoot); err != nil {
			return err
		}
	}
	return p.Run(ctx)
}

// held returns the devices that containers have, by either API.
func (o *provisionOptions) held(host *discovery.Host, known []discovery.Device) (map[string]string, error) {
	boot, _ := host.ReadText("/proc/sys/kernel/random/boot_id") // without a boot ID, records of every boot apply
	inHost := func(dir string) string { return strings.TrimPrefix(path.Clean("/"+dir), "/") }
	kubelet := inHost(o.kubeletRoot)
	state := path.Join(kubelet, "plugins", discovery.Domain)
	held, claimsErr := ledger.Read(host.FS, state, boot)
	granted, grantsErr := legacy.Held(host.FS, kubelet, inHost(o.devicePluginDir), known)
	maps.Copy(granted, held)
	return granted, errors.Join(claimsErr, grantsErr)
}

// loadProvisionConfig reads the configuration.
func loadProvisionConfig(file string) ([]provision.Rule, error) {
	data, err := readFile(file)
	if err != nil {
		return nil, fmt.Errorf("read config: %w", err)
	}
	wanted, err := compile.Provision(data)
	if err != nil {
		return nil, fmt.Errorf("config %s: %w", file, err)
	}
	return wanted, nil
}
