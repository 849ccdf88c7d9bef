// Command testrun runs the tests of this project for the Makefile and for CI.
//
//	testrun test ARGUMENTS...           go test, with a record of times and of skipped tests
//	testrun leave-out NAME REASON       records tests that this machine cannot run
//	testrun report                      prints the records: times, and tests that were left out
//	testrun parts [-deadline T] LIST    the parts of make test-all, one after another
//	testrun flaky FLAGS PACKAGES...     tests several times beside a load: see make flaky
//
// The environment variable TEST_RESULTS names the file with the records. Without the variable,
// nothing is recorded.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"
)

// resultsVariable is the environment variable with the path of the records.
const resultsVariable = "TEST_RESULTS"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Stdout, os.Args[1:])
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit): // go test has printed the reason
		os.Exit(1)
	default:
		fmt.Fprintln(os.Stderr, "testrun:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, args []string) error {
	if len(args) == 0 {
		return errors.New("a command is missing: test, leave-out, report, parts or flaky")
	}
	records := recordFile(os.Getenv(resultsVariable))
	command, args := args[0], args[1:]
	switch {
	case command == "test":
		return runGoTest(ctx, out, records, args)
	case command == "leave-out" && len(args) == 2:
		fmt.Fprintf(out, "LEFT OUT: %s: %s\n", args[0], args[1])
		return records.add(record{Package: args[0], Result: skipped, Reason: args[1]})
	case command == "report" && len(args) == 0:
		all, err := records.read()
		if err != nil {
			return err
		}
		printTimes(out, all)
		printLeftOut(out, all)
		return nil
	case command == "flaky":
		return flakyCommand(ctx, out, args)
	case command == "parts":
		return partsCommand(ctx, out, args)
	}
	return fmt.Errorf("unknown command or arguments: %s %q", command, args)
}

func partsCommand(ctx context.Context, out io.Writer, args []string) error {
	flags := flag.NewFlagSet("parts", flag.ContinueOnError)
	seconds := flags.Int64("deadline", 0, "start no part that would end after this time, in seconds since 1970")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 {
		return errors.New("the list of parts is missing")
	}
	parts, err := readParts(flags.Arg(0))
	if err != nil {
		return err
	}
	state, err := readPasses(passesFile())
	if err != nil {
		fmt.Fprintf(out, "no last passes: %v\n", err)
	}
	runner := partRunner{out: out, passes: state, now: time.Now, run: runMake, rotation: rotation(ctx)}
	if *seconds != 0 {
		runner.deadline = time.Unix(*seconds, 0)
	}
	return runner.runAll(ctx, parts)
}
