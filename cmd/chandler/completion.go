package main

import (
	"strings"

	"github.com/spf13/cobra"
)

// outputs lists the output formats of each command.
var outputs = map[string][]cobra.Completion{
	"discover":       {"table", "wide", "tree", "json", "yaml", "labels"},
	"inventory":      {"tree", "json", "yaml"},
	"migrate plan":   {"table", "json"},
	"migrate status": {"table", "json"},
}

// addCompletions adds shell completions for the values of flags, and for host recordings as
// arguments. Existing completions of a command remain.
func addCompletions(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		addCompletions(sub)
	}
	_, name, _ := strings.Cut(cmd.CommandPath(), " ")
	register := func(flag string, values ...cobra.Completion) {
		if cmd.Flags().Lookup(flag) == nil {
			return
		}
		if _, there := cmd.GetFlagCompletionFunc(flag); !there {
			_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)) // the flag exists and has no completion
		}
	}
	if values := outputs[name]; values != nil {
		register("output", values...)
	}
	register("to", "DRA", "DevicePlugin", "Auto")
	if strings.Contains(cmd.Use, ".host") && cmd.ValidArgsFunction == nil {
		cmd.ValidArgsFunction = cobra.FixedCompletions([]cobra.Completion{"host"}, cobra.ShellCompDirectiveFilterFileExt)
	}
}
