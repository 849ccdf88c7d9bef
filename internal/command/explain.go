package command

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/terminal"
)

// NewExplain returns the command that explains the codes of doctor. program is the program with its
// arguments so far, as users type it.
func NewExplain(program string) *cobra.Command {
	var ascii bool
	cmd := &cobra.Command{
		Use:   "explain [CODE]...",
		Short: "Describe a code of chandler doctor and its fix",
		Long: `Describe a code of "chandler doctor": what is checked, what causes the fault, its
consequences, and what each command of the fix does. Without a code, the command
lists all codes.`,
		Example: "  " + program + " explain CH0104\n  " + program + " explain",
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			var ids []string
			for _, c := range codes.Codes() {
				ids = append(ids, c.ID+"\t"+c.Says)
			}
			return ids, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return explainCodes(program, cmd.OutOrStdout(), terminal.StyleOf(cmd.OutOrStdout(), os.LookupEnv, ascii), args)
		},
	}
	cmd.Flags().BoolVar(&ascii, "ascii", false, "print only ASCII characters")
	return cmd
}

func explainCodes(program string, out io.Writer, style terminal.Style, ids []string) error {
	if len(ids) == 0 {
		return codes.ListCodes(out, style)
	}
	var found []codes.Code
	var unknown []string
	for _, id := range ids {
		code, known := codes.Lookup(id)
		if !known {
			code, known = codes.Lookup("CH" + id)
		}
		if !known {
			unknown = append(unknown, strconv.Quote(id))
		}
		found = append(found, code)
	}
	if len(unknown) > 0 {
		return WithExitCode(fmt.Errorf("there is no code %s; %s explain lists them", strings.Join(unknown, " and no "), program), 2)
	}
	for i, code := range found {
		if i > 0 {
			fmt.Fprintln(out)
		}
		if err := code.WriteExplanation(out, style); err != nil {
			return err
		}
	}
	return nil
}
