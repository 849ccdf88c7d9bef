package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"chandler.dev/internal/uninstall"
)

// newUninstallCommand returns the command for the Job of the chart, whose image contains this
// program only. Users run the command of kubectl-chandler.
func newUninstallCommand() *cobra.Command {
	var o runOptions
	var namespace string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:     "uninstall",
		Short:   "Remove all agents from their nodes",
		Long:    uninstall.Help + "\n\nThe Job of the Helm chart runs this command in the agent's image. On your own\nmachine, run \"kubectl chandler uninstall\".",
		Example: `  chandler uninstall --kubeconfig ~/.kube/config`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			clients, err := o.connect()
			if err != nil {
				return fmt.Errorf("API server: %w", err)
			}
			return uninstall.Run(cmd.Context(), clients.main, namespace, timeout, cmd.OutOrStdout())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig `file` for the API server; optional in a pod")
	flags.StringVar(&namespace, "namespace", uninstall.DefaultNamespace, "`namespace` of the agents")
	flags.DurationVar(&timeout, "timeout", uninstall.DefaultTimeout, "how long to wait for the agents before they continue to offer devices")
	o.kubeQPS, o.kubeBurst = 20, 40
	return cmd
}
