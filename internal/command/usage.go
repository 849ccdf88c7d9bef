package command

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"chandler.dev/internal/inventory"
)

// codeUsage is the exit code of wrong usage, as of commands of a shell.
const codeUsage = 2

// UsageError returns an error of wrong usage: an unknown command or flag, a wrong number of
// arguments, or an invalid value. Its exit code is 2.
func UsageError(err error) error {
	if err == nil {
		return nil
	}
	return WithExitCode(err, codeUsage)
}

// A Group is a heading in the help of a program, with the names of its commands.
type Group struct {
	Title    string
	Commands []string
}

// Finish completes the command of a program once all its commands are added: wrong usage has one form
// and one exit code, and the help lists the commands in groups. All commands without a group follow
// under another heading.
func Finish(root *cobra.Command, groups ...Group) {
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return UsageError(fmt.Errorf("%w; see %s --help", err, cmd.CommandPath()))
	})
	root.SetHelpCommand(newHelp(root))
	root.InitDefaultHelpCmd()
	initCompletion(root)
	for _, group := range groups {
		root.AddGroup(&cobra.Group{ID: group.Title, Title: group.Title + ":"})
		for _, name := range group.Commands {
			cmd, _, err := root.Find([]string{name})
			if err != nil || cmd == root {
				panic("no command " + name)
			}
			cmd.GroupID = group.Title
		}
	}
	checkArguments(root)
}

// initCompletion adds the command for completion scripts now, so that it has the form of the others.
// cobra's own functions write to the output of the moment when the command is added.
func initCompletion(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	completion, _, err := root.Find([]string{"completion"})
	if err != nil || completion == root {
		return
	}
	for _, shell := range completion.Commands() {
		shell.RunE = func(cmd *cobra.Command, _ []string) error {
			plain, _ := cmd.Flags().GetBool("no-descriptions") // all these commands have the flag
			return writeCompletion(cmd.OutOrStdout(), root, cmd.Name(), !plain)
		}
	}
}

// writeCompletion writes the completion script of a shell.
func writeCompletion(out io.Writer, root *cobra.Command, shell string, described bool) error {
	switch {
	case shell == "bash":
		return root.GenBashCompletionV2(out, described)
	case shell == "fish":
		return root.GenFishCompletion(out, described)
	case shell == "zsh" && described:
		return root.GenZshCompletion(out)
	case shell == "zsh":
		return root.GenZshCompletionNoDesc(out)
	case described:
		return root.GenPowerShellCompletionWithDesc(out)
	}
	return root.GenPowerShellCompletion(out)
}

// checkArguments makes wrong numbers of arguments, unknown commands, and missing flags errors of usage.
func checkArguments(cmd *cobra.Command) {
	check, parent := cmd.Args, cmd.HasSubCommands()
	if !cmd.Runnable() { // cobra does not check the arguments of such a command
		cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		switch {
		case parent && len(args) > 0:
			return unknownCommand(cmd, args[0])
		case check != nil && check(cmd, args) != nil:
			return UsageError(fmt.Errorf("%s given; usage: %s", inventory.CountNoun(len(args), "argument"), cmd.UseLine()))
		}
		if err := cmd.ValidateRequiredFlags(); err != nil {
			return UsageError(fmt.Errorf("%w; usage: %s", err, cmd.UseLine()))
		}
		return nil
	}
	for _, child := range cmd.Commands() {
		checkArguments(child)
	}
}

// unknownCommand returns the error for a command that does not exist, with similar ones.
func unknownCommand(parent *cobra.Command, name string) error {
	text := fmt.Sprintf("there is no command %q; %s --help lists them", name, parent.CommandPath())
	parent.SuggestionsMinimumDistance = min(2, (len(name)+1)/3) // letters that may differ
	if similar := parent.SuggestionsFor(name); len(similar) > 0 {
		text = fmt.Sprintf("there is no command %q; similar: %s", name, strings.Join(similar, ", "))
	}
	return UsageError(fmt.Errorf("%s", text))
}

// newHelp returns the command that prints the help of another command.
func newHelp(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Print the help of a command",
		ValidArgsFunction: func(_ *cobra.Command, args []string, start string) (names []string, _ cobra.ShellCompDirective) {
			if cmd, _, err := root.Find(args); err == nil {
				for _, child := range cmd.Commands() {
					if child.IsAvailableCommand() && strings.HasPrefix(child.Name(), start) {
						names = append(names, cobra.CompletionWithDesc(child.Name(), child.Short))
					}
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(_ *cobra.Command, args []string) error {
			cmd, rest, err := root.Find(args)
			if err != nil || len(rest) > 0 {
				parent := root
				if cmd != nil {
					parent = cmd
				}
				return unknownCommand(parent, append(rest, args...)[0])
			}
			cmd.InitDefaultHelpFlag()
			return cmd.Help()
		},
	}
}
