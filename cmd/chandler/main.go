// Command chandler finds the accelerators of a host and offers them to Kubernetes, through Dynamic
// Resource Allocation (DRA) and through the device plugin API. It contains the commands that run on
// nodes; the commands for users of a cluster are in kubectl-chandler.
package main

import (
	"os"

	"github.com/spf13/cobra"

	"chandler.dev/internal/command"
)

func main() { os.Exit(command.Run(newCommand())) }

func newCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "chandler",
		Short: "Node agent for accelerators in Kubernetes",
		Long: `Chandler finds every accelerator of a host (GPU, FPGA, NPU, NIC, KVM, of any
vendor) and offers it to Kubernetes through Dynamic Resource Allocation, or
through the device plugin API where the cluster does not support it.

To list the accelerators of this machine, without a cluster and without root:

  chandler discover`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.AddCommand(newRunCommand(), newDiscoverCommand(), newRecordCommand(), newSimulateCommand(), newProvisionCommand(), newMigrateCommand(), newSlicesCommand(), newInventoryCommand())
	cmd.AddCommand(newDoctorCommand(), command.NewExplain("chandler"), command.NewVersion("chandler", buildVersion()))
	cmd.AddCommand(newUninstallCommand(), newHookCommand())
	addMoved(cmd)
	addCompletions(cmd)
	command.Finish(cmd,
		command.Group{Title: "Look at a node", Commands: []string{"discover", "inventory", "doctor", "explain", "slices"}},
		command.Group{Title: "Run and maintain a node", Commands: []string{"run", "provision", "migrate", "uninstall", "hook"}},
		command.Group{Title: "Host recordings", Commands: []string{"record", "simulate"}},
	)
	return cmd
}
