// Package kubectl implements the commands for users of a cluster without access to its nodes. top,
// who, why and report read the cluster with the user's own permissions, import and validate read
// files only, migrate runs a command in an agent's pod, and uninstall gives orders to the agents.
package kubectl

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"chandler.dev/cmd/kubectl-chandler/kubectl/cluster"
	"chandler.dev/internal/command"
	"chandler.dev/internal/terminal"
)

// The binary's names as a kubectl plugin, and as the plugin's shell completion (pkg/cmd/plugin.go
// and plugin_completion.go of k8s.io/kubectl 0.26 to 0.37).
const (
	pluginName     = "kubectl-chandler"
	completionName = "kubectl_complete-chandler"
)

// PluginArguments returns the plugin's arguments. To complete words, kubectl runs the binary under
// another name, with the words typed so far.
func PluginArguments(args []string) []string {
	if strings.HasPrefix(filepath.Base(args[0]), completionName) {
		return append([]string{cobra.ShellCompRequestCmd}, args[1:]...)
	}
	return args[1:]
}

// PluginCommand returns the command that kubectl runs as "kubectl chandler".
func PluginCommand(version string) *cobra.Command {
	cmd := &cobra.Command{
		Use:         pluginName,
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl chandler"},
		Short:       "Count, explain and configure the accelerators of a cluster",
		Long: `The commands of Chandler for your own machine. top, who, why and report read
ResourceSlices, ResourceClaims, DeviceClasses, nodes and pods with your own
permissions, and change nothing. They omit objects that you may not read, and
print a message on standard error. import and validate read files and need no
cluster. The program chandler has the commands for nodes.`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	for _, of := range commands {
		cmd.AddCommand(of(newOptions(version)))
	}
	cmd.AddCommand(newImport(), newValidate())
	cmd.AddCommand(command.NewExplain("kubectl chandler"), command.NewVersion(pluginName, version))
	command.Finish(cmd,
		command.Group{Title: "Look at a cluster", Commands: []string{"top", "who", "why", "report", "explain"}},
		command.Group{Title: "Configure and maintain a cluster", Commands: []string{"import", "validate", "migrate", "uninstall"}},
	)
	return cmd
}

// commands are the commands that connect to a cluster.
var commands = []func(*options) *cobra.Command{newTop, newWho, newWhy, newReport, newMigrate, newUninstall}

// options are common to all commands.
type options struct {
	cluster.Connection
	output string
	ascii  bool

	// Set by tests.
	now   func() time.Time
	width int
}

func newOptions(version string) *options {
	return &options{Connection: cluster.NewConnection(version), now: time.Now}
}

// addFlags adds the flags that select a cluster, and the flag for ASCII.
func (o *options) addFlags(flags *pflag.FlagSet) {
	o.AddClusterFlags(flags)
	flags.BoolVar(&o.ascii, "ascii", false, "print only ASCII characters")
}

// addOutput adds the flag for the output format.
func (o *options) addOutput(flags *pflag.FlagSet) {
	flags.StringVarP(&o.output, "output", "o", "", "json, or empty for text")
}

func (o *options) checkOutput() error {
	if o.output != "" && o.output != "json" {
		return command.UsageError(fmt.Errorf("output format %q: want json", o.output))
	}
	return nil
}

// style returns the style of the command's output.
func (o *options) style(cmd *cobra.Command) terminal.Style {
	style := terminal.StyleOf(cmd.OutOrStdout(), os.LookupEnv, o.ascii)
	if o.width > 0 {
		style.Width = o.width
	}
	return style
}

// read reads the cluster, and reports on standard error what was not readable.
func (o *options) read(ctx context.Context, cmd *cobra.Command, what cluster.Reading) (*view, error) {
	v, err := o.ReadView(ctx, o.now(), what)
	if err != nil {
		return nil, err
	}
	for _, missing := range v.Missing {
		fmt.Fprintln(cmd.ErrOrStderr(), "unknown:", missing)
	}
	return &view{v}, nil
}

// A view is the part of a cluster that the user may read.
type view struct{ *cluster.View }
