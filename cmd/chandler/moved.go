package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"chandler.dev/internal/command"
)

// moved lists the commands that this program does not have, with their names in kubectl-chandler.
var moved = []struct{ name, desk string }{
	{"top", "top"},
	{"who", "who"},
	{"why", "why"},
	{"report", "report"},
	{"validate", "validate"},
	{"import", "import"},
	{"config", "import"}, // chandler config import
}

// addMoved adds a hidden command for each moved command, which fails with the name of the command
// to use.
func addMoved(cmd *cobra.Command) {
	for _, m := range moved {
		cmd.AddCommand(&cobra.Command{
			Use:                m.name,
			Hidden:             true,
			DisableFlagParsing: true,
			RunE: func(*cobra.Command, []string) error {
				return command.UsageError(fmt.Errorf("%s is a command of kubectl-chandler: kubectl chandler %s", m.desk, m.desk))
			},
		})
	}
}
