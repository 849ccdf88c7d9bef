package main

import (
	"strings"

	"github.com/spf13/cobra"
)

// outputs are the formats that each command prints.
var outputs = map[string][]cobra.Completion{
	"discover":       {"table", "wide", "tree", "json", "yaml", "labels"},
	"inventory":      {"tree", "json", "yaml"},
	"migrate plan":   {"table", "json"},
	"migrate status": {"table", "json"},
}

// addCompletions has shells complete the values of flags, and the files of recorded hosts
// where a command takes one. Completions that a command has of its own stay.
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
			_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)) // the flag is there, and nobody else completes it
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
