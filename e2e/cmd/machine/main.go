// Command machine runs the processes of a machine from package machine. Only that package starts
// the command.
package main

import (
	"fmt"
	"os"

	"chandler.dev/e2e/machine"
)

func main() {
	status, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "machine:", err)
		os.Exit(1)
	}
	os.Exit(status)
}

func run(args []string) (status int, err error) {
	switch {
	case len(args) == 1 && args[0] == "supervise":
		return 0, machine.Supervise(os.Stdin, os.Stdout)
	case len(args) == 1 && args[0] == "init":
		return 0, machine.Init(os.Stdin)
	case len(args) > 2 && args[0] == "enter":
		return machine.Enter(args[1], args[2:])
	case len(args) > 1 && args[0] == "exec":
		return 0, machine.Exec(args[1:])
	}
	return 0, fmt.Errorf("usage: machine supervise | init | enter PID PROGRAM [ARGUMENT...] | exec PROGRAM [ARGUMENT...]")
}
