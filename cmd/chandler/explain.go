package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"chandler.dev/internal/doctor"
	"chandler.dev/internal/terminal"
)

func newExplainCommand() *cobra.Command {
	var ascii bool
	cmd := &cobra.Command{
		Use:   "explain [CODE]...",
		Short: "Say what a code of chandler doctor means, and how to mend it",
		Long: `Say what a code of "chandler doctor" means: what is looked at, how it comes to be,
why it matters, and what each command that mends it does. Without a code it lists
all codes.`,
		Example: `  chandler explain CH0104
  chandler explain`,
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			var ids []string
			for _, c := range doctor.Codes() {
				ids = append(ids, c.ID+"\t"+c.Says)
			}
			return ids, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return explain(cmd.OutOrStdout(), terminal.Of(cmd.OutOrStdout(), os.LookupEnv, ascii), args)
		},
	}
	cmd.Flags().BoolVar(&ascii, "ascii", false, "print no other characters than ASCII's")
	return cmd
}

func explain(out io.Writer, style terminal.Style, codes []string) error {
	if len(codes) == 0 {
		return doctor.List(out, style)
	}
	for i, id := range codes {
		code, known := doctor.Lookup(id)
		if !known {
			return doctorError{fmt.Errorf("there is no code %q; chandler explain lists them", id), 2}
		}
		if i > 0 {
			fmt.Fprintln(out)
		}
		if err := code.Explain(out, style); err != nil {
			return err
		}
	}
	return nil
}
