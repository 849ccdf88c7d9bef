package command

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

func TestExitCode(t *testing.T) {
	plain := errors.New("plain")
	coded := WithExitCode(plain, 2)
	for _, test := range []struct {
		err  error
		want int
	}{
		{plain, 1},
		{errors.Join(errors.New("read"), os.ErrNotExist), 1},
		{coded, 2},
		{fmt.Errorf("wrapped: %w", coded), 2},
	} {
		if got := ExitCode(test.err); got != test.want {
			t.Errorf("%v: exit code %d, want %d", test.err, got, test.want)
		}
	}
	if !errors.Is(coded, plain) || coded.Error() != "plain" {
		t.Errorf("the error with a code is %v", coded)
	}
}

func TestRun(t *testing.T) {
	for _, test := range []struct {
		err  error
		want int
	}{{nil, 0}, {errors.New(""), 1}, {WithExitCode(errors.New(""), 3), 3}} {
		cmd := &cobra.Command{Use: "program", SilenceErrors: true, SilenceUsage: true, RunE: func(*cobra.Command, []string) error { return test.err }}
		cmd.SetArgs(nil)
		if got := Run(cmd); got != test.want {
			t.Errorf("error %v: exit code %d, want %d", test.err, got, test.want)
		}
	}
}

// Both programs have the same commands, with their own names.
func TestSharedCommands(t *testing.T) {
	for _, program := range []string{"chandler", "kubectl chandler"} {
		run := func(cmd *cobra.Command, args ...string) (string, error) {
			var out bytes.Buffer
			cmd.SetArgs(args)
			cmd.SetOut(&out)
			cmd.SetErr(&out)
			err := cmd.Execute()
			return out.String(), err
		}
		if out, err := run(NewVersion(program, "v1.2.3")); err != nil || !strings.HasPrefix(out, program+" v1.2.3 go") {
			t.Errorf("version: %q, %v", out, err)
		}
		if out, err := run(NewExplain(program), "--help"); err != nil || !strings.Contains(out, "  "+program+" explain CH0104\n") {
			t.Errorf("help of explain: %v\n%s", err, out)
		}
		_, err := run(NewExplain(program), "CH9999")
		if err == nil || ExitCode(err) != 2 || !strings.HasSuffix(err.Error(), "; "+program+" explain lists them") {
			t.Errorf("unknown code: %v", err)
		}
	}
}
