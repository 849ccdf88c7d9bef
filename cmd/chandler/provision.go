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

	"chandler.dev/cmd/chandler/settings"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/internal/compile"
	"chandler.dev/internal/ledger/allocation"
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
		Long: `Set the PCI functions of this host to the state in a ProvisionConfig: create SR-IOV
virtual functions, bind functions to a driver such as vfio-pci, choose the services
of Intel QAT, and configure the work queues of Intel DSA and IAA. The command works
once, when it is run; the agent does not do this.

The output has a line for each change, with the previous and the new value, or
"nothing to do". Functions without a matching rule are not changed, and the removal
of a rule undoes nothing.

The command refuses to change a function in use: with a disk that is mounted in any
mount namespace, is swap, or is used by LVM, a loop device or the kernel's exports;
with an interface of a route of the host; with a device node that a process has
open; or allocated to a container by either API. It refuses to unbind a function
whose interface is up, and to remove virtual functions that are bound to a driver. A
function whose use is unknown is treated as in use. After a function that cannot be
changed, the command continues, and its exit code is not 0.

The command can be run again at any time, and does the remaining work. After a kill,
the next run first restores temporary settings, such as sriov_drivers_autoprobe,
from /run/chandler/provision.json. Only one command runs at a time.

It needs root, the host's processes in /proc, and the requested drivers loaded.`,
		Example: `  chandler provision --config provision.yaml --dry-run
  sudo chandler provision --config provision.yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.Context(), cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&o.config, "config", "", "ProvisionConfig `file`, or - for standard input")
	cmd.Flags().BoolVar(&o.dryRun, "dry-run", false, "print the changes without making them")
	cmd.Flags().StringVar(&o.hostRoot, "host-root", "/", "`directory` with the host's /sys, /proc and /dev")
	cmd.Flags().StringVar(&o.kubeletRoot, "kubelet-root", "/var/lib/kubelet", "the kubelet's `directory` on the host, its --root-dir, below --host-root")
	cmd.Flags().StringVar(&o.devicePluginDir, "device-plugin-dir", pluginapi.DevicePluginPath, "the kubelet's device-plugins `directory` below --host-root, which does not depend on the kubelet's --root-dir")
	_ = cmd.MarkFlagRequired("config") // the flag exists
	return cmd
}

func (o *provisionOptions) run(ctx context.Context, out io.Writer) error {
	wanted, err := loadProvisionConfig(o.config)
	if err != nil {
		return err
	}
	hostFS, err := settings.OpenHostRoot(o.hostRoot)
	if err != nil {
		return err
	}
	host := &discovery.Host{FS: hostFS}
	p := &provision.Provisioner{
		Host:     host,
		Families: families.All,
		Rules:    wanted,
		Held:     func(known []discovery.Device) (map[string]string, error) { return o.allocatedDevices(host, known) },
		Out:      out,
	}
	if !o.dryRun {
		journal, err := provision.OpenJournal(o.hostRoot)
		if err != nil {
			return err
		}
		defer journal.Close()
		p.Keep = journal.KeepJournal
		if p.Write, err = provision.Writer(o.hostRoot); err != nil {
			return err
		}
	}
	return p.Run(ctx)
}

// allocatedDevices returns the devices that containers have, by either API.
func (o *provisionOptions) allocatedDevices(host *discovery.Host, known []discovery.Device) (map[string]string, error) {
	boot, _ := host.ReadText("/proc/sys/kernel/random/boot_id") // without a boot ID, records of every boot apply
	inHost := func(dir string) string { return strings.TrimPrefix(path.Clean("/"+dir), "/") }
	kubelet := inHost(o.kubeletRoot)
	state := path.Join(kubelet, "plugins", discovery.Domain)
	held, claimsErr := allocation.ReadOwners(host.FS, state, boot)
	granted, grantsErr := legacy.HeldDevices(host.FS, kubelet, inHost(o.devicePluginDir), known)
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
