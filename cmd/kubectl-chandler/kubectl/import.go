package kubectl

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"chandler.dev/cmd/kubectl-chandler/importer"
	"chandler.dev/internal/command"
	"chandler.dev/internal/compile"
	"chandler.dev/internal/inventory"
)

func newImport() *cobra.Command {
	var options importer.Options
	cmd := &cobra.Command{
		Use:   "import FILE...",
		Short: "Write a DriverConfig from the configuration of other device plugins",
		Long: `Read configurations of device plugins that Chandler replaces, and write an
equivalent DriverConfig to standard output. Claims, claim templates and
DeviceClasses of other DRA drivers are written for the devices of Chandler. The
command needs no cluster.

The supported formats are
` + importer.Formats() + `
The command recognizes the type of a file: a configuration file, a ConfigMap, a
DaemonSet or Pod with arguments and environment variables, a custom resource, Helm
values, a List of these, or arguments or environment variables alone; YAML with any
number of documents, or JSON, also with comments. Name all files of a plugin
together, because its flags affect its configuration. - is standard input.

Comments at the beginning of the output list all settings without an equivalent,
with their place and the reason. Settings that affect pods come first.

The exit code is 0 if pods get the same as before, 2 if a setting without an
equivalent changes this, and 1 if a file could not be read.`,
		Example: `  kubectl chandler import time-slicing.yaml > config.yaml
  kubectl -n kube-system get daemonset,configmap -o yaml | kubectl chandler import -
  kubectl chandler import values.yaml --named=mig-mixed | kubectl chandler validate -`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return importFiles(cmd.InOrStdin(), cmd.OutOrStdout(), args, options)
		},
	}
	cmd.Flags().StringVar(&options.Named, "named", "", "import only the configuration of this `name`, if nodes have different ones")
	cmd.Flags().BoolVar(&options.Only, "only", false, "exclude devices of families that the files do not mention")
	return cmd
}

// errChanged is the error for a configuration with changes for pods: the number of changed
// settings.
type errChanged int

// errChangedCode is the exit code of errChanged.
const errChangedCode = 2

func (e errChanged) Error() string {
	return fmt.Sprintf("what pods get changes by %s that could not be carried over; see the comments", inventory.CountNoun(int(e), "setting"))
}

// ExitCode returns the exit code of the program.
func (e errChanged) ExitCode() int { return errChangedCode }

// importFiles writes the configuration. It writes nothing if a file cannot be read.
func importFiles(in io.Reader, out io.Writer, names []string, options importer.Options) error {
	var files []importer.File
	var errs []error
	for _, name := range names {
		data, err := command.ReadInput(in, name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		files = append(files, importer.File{Name: name, Data: data})
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	result, err := importer.Import(files, options)
	if err != nil {
		return err
	}
	data, err := result.YAML()
	if err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	config, err := result.ConfigYAML()
	if err == nil && config != nil {
		_, err = compile.Config(config)
	}
	if err != nil {
		return fmt.Errorf("check configuration: %w", err)
	}
	if _, err := out.Write(data); err != nil {
		return err
	}
	if changed := result.ChangedPods(); changed > 0 {
		return errChanged(changed)
	}
	return nil
}
