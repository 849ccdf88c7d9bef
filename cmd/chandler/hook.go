package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"chandler.dev/cdi/hook"
	nvidia "chandler.dev/discovery/families/nvidia/hook"
)

// newHookCommand returns the command that container runtimes run for CDI specs of the agent.
func newHookCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "hook",
		Short: "Change a container that is being created, for container runtimes",
		Long: `Change the file system of a container that is being created.

Container runtimes call these commands, as named in the agent's CDI specs, with the
container's state on standard input. They run no file of the container, and follow no
link out of it. They are not intended for manual use.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	for _, h := range slices.Concat(hook.Common(), nvidia.All()) {
		cmd.AddCommand(hookCommand(h))
	}
	return cmd
}

func hookCommand(h hook.Hook) *cobra.Command {
	values := make(map[string]*[]string)
	cmd := &cobra.Command{
		Use:   h.Name,
		Short: strings.ToUpper(h.Short[:1]) + h.Short[1:],
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			flags := make(map[string][]string)
			for name, given := range values {
				flags[name] = *given
			}
			if err := runHook(h, cmd.InOrStdin(), flags); err != nil {
				return fmt.Errorf("hook %s: %w", h.Name, err)
			}
			return nil
		},
	}
	for name, help := range h.Flags {
		values[name] = cmd.Flags().StringArray(name, nil, help)
	}
	return cmd
}

func runHook(h hook.Hook, state io.Reader, flags map[string][]string) error {
	container, err := hook.ReadContainer(state)
	if err != nil {
		return err
	}
	defer container.Close()
	return h.Run(container, flags)
}
