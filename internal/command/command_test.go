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
	}{{nil, 0}, {errors.New(""), 1}, {WithExitCode(errors.New(""), 3), 3}, {UsageError(errors.New("")), 2}} {
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

// Wrong usage has the exit code 2 in each command, and an error that helps.
func TestUsage(t *testing.T) {
	for arguments, want := range map[string]string{
		"":                   "",
		"list":               "",
		"list a b":           "2 arguments given; usage: program list [NAME] [flags]",
		"list --nope":        "unknown flag: --nope; see program list --help",
		"lisp":               `there is no command "lisp"; similar: list`,
		"lost":               `there is no command "lost"; similar: list`,
		"nope":               `there is no command "nope"; program --help lists them`,
		"parent":             "",
		"parent nope":        `there is no command "nope"; program parent --help lists them`,
		"parent chil":        `there is no command "chil"; similar: child`,
		"parent child":       "",
		"parent child --x":   "unknown flag: --x; see program parent child --help",
		"help":               "",
		"help list":          "",
		"help parent child":  "",
		"help nope":          `there is no command "nope"; program --help lists them`,
		"help parent nope":   `there is no command "nope"; program parent --help lists them`,
		"help list nope":     `there is no command "nope"; program list --help lists them`,
		"other":              "",
		"strict":             `required flag(s) "config" not set; usage: program strict --config FILE [flags]`,
		"strict --config x":  "",
		"completion":         "",
		"completion nope":    `there is no command "nope"; program completion --help lists them`,
		"other with any arg": "",
	} {
		nothing := func(*cobra.Command, []string) error { return nil }
		root := &cobra.Command{Use: "program", SilenceErrors: true, SilenceUsage: true}
		parent := &cobra.Command{Use: "parent", RunE: nothing}
		parent.AddCommand(&cobra.Command{Use: "child", RunE: nothing})
		root.AddCommand(&cobra.Command{Use: "list [NAME]", Args: cobra.MaximumNArgs(1), RunE: nothing}, parent, &cobra.Command{Use: "other", RunE: nothing})
		strict := &cobra.Command{Use: "strict --config FILE", RunE: nothing}
		strict.Flags().String("config", "", "")
		if err := strict.MarkFlagRequired("config"); err != nil {
			t.Fatal(err)
		}
		root.AddCommand(strict)
		Finish(root, Group{"Lists", []string{"list"}})
		var out bytes.Buffer
		root.SetOut(&out)
		root.SetErr(&out)
		root.SetArgs(strings.Fields(arguments))
		code := 0
		if want != "" {
			code = 2
		}
		if got := Run(root); got != code {
			t.Errorf("%q: exit code %d, want %d", arguments, got, code)
		}
		root.SetArgs(strings.Fields(arguments))
		if err := root.Execute(); (err == nil) != (want == "") || err != nil && !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v, want %q", arguments, err, want)
		}
		if arguments == "" && !strings.Contains(out.String(), "\nLists:\n  list ") {
			t.Errorf("the help has no group:\n%s", out.String())
		}
	}
}
