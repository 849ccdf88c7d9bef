// Command kubectl-chandler contains the commands of Chandler for users of a cluster. kubectl runs
// it as "kubectl chandler". It does not run on nodes, and the agent's image does not contain it.
package main

import (
	"os"

	"chandler.dev/cmd/kubectl-chandler/kubectl"
	"chandler.dev/internal/command"
)

// version is set by the linker: -ldflags "-X main.version=v1.2.3".
var version = ""

func main() {
	cmd := kubectl.PluginCommand(command.BuildVersion(version))
	cmd.SetArgs(kubectl.PluginArguments(os.Args))
	os.Exit(command.Run(cmd))
}
