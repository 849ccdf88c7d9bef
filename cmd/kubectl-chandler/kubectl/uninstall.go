package kubectl

import (
	"cmp"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"chandler.dev/internal/uninstall"
)

func newUninstall(o *options) *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:     "uninstall",
		Short:   "Remove all agents from their nodes",
		Long:    uninstall.Help,
		Example: "  kubectl chandler uninstall\n  kubectl chandler uninstall --namespace accelerators",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := o.NewClient()
			if err != nil {
				return fmt.Errorf("API server: %w", err)
			}
			namespace := cmp.Or(o.Overrides.Context.Namespace, uninstall.DefaultNamespace)
			return uninstall.Run(cmd.Context(), client, namespace, timeout, cmd.OutOrStdout())
		},
	}
	o.addFlags(cmd.Flags())
	cmd.Flags().Lookup("namespace").Usage = "namespace of the agents, \"" + uninstall.DefaultNamespace + "\" if left out"
	cmd.Flags().DurationVar(&timeout, "timeout", uninstall.DefaultTimeout, "how long to wait for the agents before they go on as before")
	return cmd
}
