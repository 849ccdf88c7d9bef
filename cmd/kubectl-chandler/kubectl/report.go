package kubectl

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"chandler.dev/internal/redact"
	"chandler.dev/internal/terminal"
)

// reportOptions select the content of a report.
type reportOptions struct {
	*options
	file       string
	identities bool
	anonymous  bool
	since      time.Duration
	thisNode   bool
	hostRoot   string
	local      func(ctx context.Context, args ...string) (stdout, stderr []byte, err error)
}

func newReport(o *options) *cobra.Command {
	r := &reportOptions{options: o, local: runOnNode}
	cmd := &cobra.Command{
		Use:   "report [NODE]...",
		Short: "Collect data for a bug report, without secrets",
		Long: `Write an archive for a bug report: the ResourceSlices, claims, classes and events of
Chandler, its configuration, the versions of all nodes, and for each NODE the host
recording, the output of doctor, the agent's log and its metrics. Without a NODE, all
nodes with an agent are included, if these are at most ` + fmt.Sprint(mostNodes) + `. Nothing is sent anywhere.

Secrets, the environment and arguments of pods, and objects of other drivers are left
out. Serial numbers, UUIDs, MAC and IP addresses become pseudonyms, which are the same
throughout the report; --with-identities keeps the originals. --anonymous also replaces
the names of pods, claims and namespaces. Check the archive before you send it.

The recordings are made in the agents' pods, which requires the permission to create
pods/exec. With --this-node, the command needs no cluster and reports on this machine,
with the program chandler beside this one or in the PATH.`,
		Example: `  kubectl chandler report gpu-node-07
  kubectl chandler report --anonymous
  sudo kubectl-chandler report --this-node`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			return r.run(cmd.Context(), cmd, args)
		},
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
			return o.complete(cmd, nil, word, nodeNames)
		},
	}
	o.addFlags(cmd.Flags())
	flags := cmd.Flags()
	flags.StringVarP(&r.file, "file", "f", "", "`file` to write, by default chandler-report-TIME.tar.gz, or - for standard output")
	flags.BoolVar(&r.identities, "with-identities", false, "keep serial numbers, UUIDs and network addresses")
	flags.BoolVar(&r.anonymous, "anonymous", false, "replace the names of pods, claims and namespaces")
	flags.DurationVar(&r.since, "since", 24*time.Hour, "maximum age of log lines")
	flags.BoolVar(&r.thisNode, "this-node", false, "report on this machine only, without a cluster")
	flags.StringVar(&r.hostRoot, "host-root", "/", "with --this-node, the `directory` with the host's /sys, /proc and /dev")
	return cmd
}

// mostNodes limits the nodes of a report without node arguments.
const mostNodes = 20

func (r *reportOptions) run(ctx context.Context, cmd *cobra.Command, nodes []string) error {
	now := r.now().UTC()
	c := &collection{
		redact: redact.New(r.identities),
		name:   "chandler-report-" + now.Format("2006-01-02T150405Z"),
		time:   now,
	}
	switch {
	case r.thisNode && len(nodes) > 0:
		return fmt.Errorf("--this-node is for this machine, and %s is named", nodes[0])
	case r.thisNode:
		r.collectLocal(ctx, c)
	default:
		if err := r.collect(ctx, c, nodes); err != nil {
			return err
		}
	}
	r.leftOut(c)
	c.addLine("version", fmt.Sprintf("created by %s %s", pluginName, r.Version))
	file := cmp.Or(r.file, c.name+".tar.gz")
	archive, err := c.writeArchive()
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	if file == "-" {
		_, err := out.Write(archive)
		c.write(cmd.ErrOrStderr(), r.style(cmd))
		return err
	}
	if err := create(file, archive); err != nil {
		return err
	}
	c.write(out, r.style(cmd))
	fmt.Fprintf(out, "\n%s, %s\n", file, size(len(archive)))
	return nil
}

// create writes a new file that only the user may read. It never replaces a file.
func create(file string, data []byte) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if _, err := f.Write(data); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}

func (r *reportOptions) leftOut(c *collection) {
	out := "Secrets, pods' environment and arguments, other drivers' objects"
	if !r.identities {
		out += "; serial numbers, UUIDs, MAC and IP addresses have pseudonyms"
	}
	c.addLine("left out", out)
	names := "as they are; --anonymous replaces those of pods, claims and namespaces"
	if r.anonymous {
		names = "those of pods, claims and namespaces are numbers"
	}
	c.addLine("names", names)
	if len(c.missing) > 0 {
		c.addLine("not had", strings.Join(c.missing, "; "))
	}
}

// collectLocal collects the data of this machine with commands of the program chandler.
func (r *reportOptions) collectLocal(ctx context.Context, c *collection) {
	const dir = "nodes/this/"
	var has []string
	if host, stderr, err := r.local(ctx, "record", "--host-root", r.hostRoot); err == nil {
		c.add(dir+"recorded.host", kindHost, host)
		has = append(has, "recorded host "+size(len(host)))
	} else {
		c.addMissing("recorded host", failureCause(err, stderr))
	}
	doctor, stderr, err := r.local(ctx, "doctor", "--host-root", r.hostRoot, "-o", "json")
	if len(doctor) > 0 {
		c.add(dir+"doctor.json", kindText, doctor)
		has = append(has, doctorText(doctor))
	} else {
		c.addMissing("doctor", failureCause(err, stderr))
	}
	c.addLine("this node", strings.Join(has, ", "))
}

// nodeProgram returns the path of the program chandler, which must be in the given directory or in
// the PATH.
func nodeProgram(dir string) (string, error) {
	beside := filepath.Join(dir, "chandler")
	if info, err := os.Stat(beside); err == nil && info.Mode().IsRegular() {
		return beside, nil
	}
	program, err := exec.LookPath("chandler")
	if err != nil {
		return "", fmt.Errorf("--this-node needs the program chandler, which is neither in %s nor in the PATH", dir)
	}
	return program, nil
}

// runOnNode runs a command of the program chandler on this machine.
func runOnNode(ctx context.Context, args ...string) (stdout, stderr []byte, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	program, err := nodeProgram(filepath.Dir(self))
	if err != nil {
		return nil, nil, err
	}
	cmd := exec.CommandContext(ctx, program, args...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err = cmd.Run()
	return out.Bytes(), errOut.Bytes(), err
}

// failureCause returns the cause of a failure in one line.
func failureCause(err error, stderr []byte) string {
	text := strings.TrimSpace(string(stderr))
	if lines := strings.Split(text, "\n"); text != "" {
		return lines[len(lines)-1]
	}
	if err == nil {
		return "nothing was said"
	}
	return err.Error()
}

// size formats a number of bytes.
func size(n int) string {
	switch {
	case n < 1024:
		return fmt.Sprintf("%d B", n)
	case n < 10<<20:
		return fmt.Sprintf("%d KiB", (n+1023)/1024)
	}
	return fmt.Sprintf("%d MiB", n>>20)
}

// write prints a summary of the collected data.
func (c *collection) write(out io.Writer, style terminal.Style) {
	widest := 0
	for _, l := range c.lines {
		widest = max(widest, terminal.Columns(l.title))
	}
	widest = min(widest, style.Width/3)
	for _, l := range c.lines {
		title := style.PadText(terminal.SafeText(l.title), widest)
		for _, text := range terminal.WrapText(terminal.SafeText(l.text), style.Width-widest-2) {
			fmt.Fprintf(out, "%s  %s\n", title, style.Cut(text, style.Width-widest-2))
			title = strings.Repeat(" ", widest)
		}
	}
}
