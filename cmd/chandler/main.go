// Command chandler finds the accelerators of a host and offers them to Kubernetes, through Dynamic
// Resource Allocation (DRA) and through the device plugin API.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"chandler.dev/cmd/chandler/kubectl"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := calledAs(os.Args).ExecuteContext(ctx)
	asked := ctx.Err() != nil
	stop()
	if err != nil && (!asked || !errors.Is(err, context.Canceled)) {
		if err.Error() != "" { // without a message, the output is complete and the exit code has the result
			fmt.Fprintln(os.Stderr, "chandler:", err)
		}
		os.Exit(exitCode(err))
	}
}

// exitCode returns the exit code of an error, 1 unless the error has its own.
func exitCode(err error) int {
	var says interface{ ExitCode() int }
	if errors.As(err, &says) {
		return says.ExitCode()
	}
	return 1
}

// calledAs returns the command for a command line. Kubectl runs the same binary under other names.
func calledAs(args []string) *cobra.Command {
	if !kubectl.IsPlugin(args[0]) {
		return newCommand()
	}
	cmd := kubectl.Plugin(buildVersion())
	cmd.AddCommand(newVersionCommand())
	cmd.SetArgs(kubectl.Arguments(args))
	return cmd
}

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
	cmd.AddCommand(newRunCommand(), newDiscoverCommand(), newRecordCommand(), newSimulateCommand(), newProvisionCommand(), newConfigCommand(), newMigrateCommand(), newValidateCommand(), newSlicesCommand(), newVersionCommand(), newInventoryCommand())
	cmd.AddCommand(newDoctorCommand(), newExplainCommand())
	cmd.AddCommand(newUninstallCommand(), newHookCommand())
	cmd.AddCommand(kubectl.Commands(buildVersion())...)
	addCompletions(cmd)
	return cmd
}
