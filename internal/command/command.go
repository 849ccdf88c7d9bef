// Package command contains what the programs chandler and kubectl-chandler have in common: how a
// program runs and ends, its version, and the command that explains codes.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// Run runs a program's command, which SIGINT and SIGTERM cancel, and prints its error. It returns
// the exit code of the program.
func Run(cmd *cobra.Command) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := cmd.ExecuteContext(ctx)
	stopped := ctx.Err() != nil
	stop()
	if err == nil || stopped && errors.Is(err, context.Canceled) {
		return 0
	}
	if err.Error() != "" { // without a message, the output is complete and the exit code has the result
		fmt.Fprintf(os.Stderr, "%s: %v\n", cmd.Name(), err)
	}
	return ExitCode(err)
}

// ExitCode returns the exit code of an error, 1 unless the error has its own.
func ExitCode(err error) int {
	var coded interface{ ExitCode() int }
	if errors.As(err, &coded) {
		return coded.ExitCode()
	}
	return 1
}

// WithExitCode returns an error with an exit code.
func WithExitCode(err error, code int) error { return codedError{err, code} }

type codedError struct {
	error

	code int
}

// Unwrap returns the error without the exit code.
func (e codedError) Unwrap() error { return e.error }

// ExitCode returns the exit code of the program.
func (e codedError) ExitCode() int { return e.code }

// ReadInput reads a file, or the input for the name "-".
func ReadInput(in io.Reader, file string) ([]byte, error) {
	if file == "-" {
		return io.ReadAll(in)
	}
	return os.ReadFile(file)
}
