package kubectl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"chandler.dev/cmd/kubectl-chandler/kubectl/cluster"
	"chandler.dev/internal/terminal"
)

func newMigrate(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Plan the move of a node from one API to the other, and print its progress",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newMigratePlan(o), newMigrateStatus(o))
	return cmd
}

func newMigratePlan(o *options) *cobra.Command {
	var to string
	cmd := &cobra.Command{
		Use:   "plan NODE",
		Short: "Print, device by device, what a move would do",
		Long: `Print what would become of each device of a node if the node got the label
chandler.dev/mode. It runs "chandler migrate plan" in the agent's pod, which
requires the permission to create pods/exec there, and changes nothing. To plan
for another configuration or for a recorded host, run that command itself.`,
		Example: `  kubectl chandler migrate plan worker-1
  kubectl chandler migrate plan worker-1 --to=DevicePlugin -o json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.migrate(cmd, args[0], "plan", "--to="+to)
		},
	}
	cmd.Flags().StringVar(&to, "to", "DRA", "value of the label chandler.dev/mode that the node would get: DRA, DevicePlugin or Auto")
	_ = cmd.RegisterFlagCompletionFunc("to", cobra.FixedCompletions([]cobra.Completion{"DRA", "DevicePlugin", "Auto"}, cobra.ShellCompDirectiveNoFileComp)) // the flag exists
	o.ofNode(cmd)
	return cmd
}

func newMigrateStatus(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status NODE",
		Short: "Print how far the devices of a node have moved",
		Long: `Print which API offers each device of a node, and which devices wait for which
pods. It runs "chandler migrate status" in the agent's pod, which requires the
permission to create pods/exec there, and changes nothing.`,
		Example: `  kubectl chandler migrate status worker-1`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.migrate(cmd, args[0], "status")
		},
	}
	o.ofNode(cmd)
	return cmd
}

// ofNode adds the flags and the argument of a command for one node.
func (o *options) ofNode(cmd *cobra.Command) {
	o.addFlags(cmd.Flags())
	o.addOutput(cmd.Flags())
	cmd.Args = cobra.ExactArgs(1)
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		return o.complete(cmd, args, word, nodeNames)
	}
}

// migrate runs a subcommand of "chandler migrate" in the agent's pod of a node, and prints its
// output.
func (o *options) migrate(cmd *cobra.Command, node string, args ...string) error {
	if err := o.checkOutput(); err != nil {
		return err
	}
	if o.output != "" {
		args = append(args, "--output="+o.output)
	}
	stdout, stderr, err := o.inAgent(cmd.Context(), node, append([]string{"migrate"}, args...)...)
	if err != nil {
		return fmt.Errorf("node %s: %s", node, terminal.SafeText(strings.TrimPrefix(failureCause(err, stderr), "chandler: ")))
	}
	printSafe(cmd.ErrOrStderr(), stderr)
	printSafe(cmd.OutOrStdout(), stdout)
	return nil
}

// inAgent runs a command of the program chandler in the agent's pod of a node.
func (o *options) inAgent(ctx context.Context, node string, args ...string) (stdout, stderr []byte, err error) {
	client, err := o.NewClient()
	if err != nil {
		return nil, nil, err
	}
	agents, err := cluster.ListAgents(ctx, client)
	if err != nil {
		return nil, nil, fmt.Errorf("list the agents' pods: %w", err)
	}
	pod := agents[node]
	if pod == nil {
		return nil, nil, errors.New("no agent runs there that you may see")
	}
	return o.RunInAgent(ctx, pod, args...)
}

// printSafe prints the output of another machine, without characters that a terminal interprets.
func printSafe(out io.Writer, text []byte) {
	for line := range strings.Lines(string(text)) {
		fmt.Fprintln(out, terminal.SafeText(strings.TrimSuffix(line, "\n")))
	}
}
