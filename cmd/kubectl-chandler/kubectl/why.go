package kubectl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"chandler.dev/cmd/kubectl-chandler/kubectl/cluster"
	"chandler.dev/internal/command"
	"chandler.dev/internal/fleet"
	"chandler.dev/internal/terminal"
	"chandler.dev/internal/why"
)

// Exit codes of why, other than 0.
const (
	codeWaits      = 1
	codeNotQueried = 2
)

func newWhy(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "why [NAMESPACE/]POD",
		Short: "Explain why a pod waits for accelerators",
		Long: `Explain why a pod waits for accelerators, or list its devices. The command works like
the scheduler, with the scheduler's code for CEL and for allocation. For each request,
it counts the devices of the class, and how many each condition removes, in this order:
nodes where the pod cannot run, the request's selectors, taints, allocated devices,
physical devices with allocated partitions, capacity. The remaining devices are
available to the request. The last paragraph is the place with the fewest missing
devices.

The command considers devices only. A pod may also wait for CPU or memory; the
scheduler's own message is printed if it mentions no device.

The exit code is 0 if the scheduler has found a node for the pod, 1 if the pod waits,
and 2 if the command failed.`,
		Example: `  kubectl chandler why -n ml train-42
  kubectl chandler why ml/train-42 -o json | jq '.asked[].steps'`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			waits, err := o.explainPod(cmd.Context(), cmd, args[0])
			switch {
			case err != nil:
				return command.WithExitCode(err, codeNotQueried)
			case waits:
				return command.WithExitCode(errors.New(""), codeWaits)
			}
			return nil
		},
		ValidArgsFunction: o.completePods,
	}
	o.addFlags(cmd.Flags())
	o.addOutput(cmd.Flags())
	return cmd
}

// explainPod prints the answer for a pod, and reports whether the pod waits.
func (o *options) explainPod(ctx context.Context, cmd *cobra.Command, word string) (waits bool, err error) {
	if err := o.checkOutput(); err != nil {
		return false, err
	}
	if namespace, name, qualified := strings.Cut(strings.TrimPrefix(word, "pod/"), "/"); qualified {
		o.Overrides.Context.Namespace, word = namespace, name
	} else {
		word = namespace
	}
	v, err := o.read(ctx, cmd, cluster.Reading{Drivers: true, Classes: true, Templates: true})
	if err != nil {
		return false, err
	}
	pod, err := v.Client.CoreV1().Pods(v.Namespace).Get(ctx, word, metav1.GetOptions{})
	if err != nil {
		return false, fmt.Errorf("get pod %s/%s: %w", v.Namespace, word, err)
	}
	answer, err := why.ExplainPod(ctx, v.Input, pod)
	if err != nil {
		return false, err
	}
	if pod.Status.Phase == corev1.PodPending && (!answer.Waits || answer.AwaitsClaim()) {
		events, err := v.Client.CoreV1().Events(pod.Namespace).List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("involvedObject.uid", string(pod.UID)).String()})
		if err != nil {
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: the pod's Events could not be read: %v\n", pluginName, err)
		} else {
			mine := slices.DeleteFunc(events.Items, func(e corev1.Event) bool { return e.InvolvedObject.UID != pod.UID })
			answer.AddStartProblem(mine)
			answer.AddTemplateProblem(mine)
		}
	}
	if o.output == "json" {
		return answer.Waits, writeJSON(cmd.OutOrStdout(), answer)
	}
	w := whyWriter{out: cmd.OutOrStdout(), style: o.style(cmd), now: v.Now}
	w.write(answer)
	return answer.Waits, nil
}

// whyWriter writes an answer for a terminal.
type whyWriter struct {
	out   io.Writer
	style terminal.Style
	now   time.Time
}

func (w *whyWriter) line(format string, args ...any) {
	fmt.Fprintln(w.out, strings.TrimRight(fmt.Sprintf(format, args...), " "))
}

// text writes a text in as many lines as necessary. All lines after the first are indented.
func (w *whyWriter) text(indent int, text string) {
	for i, line := range terminal.WrapText(terminal.SafeText(text), w.style.Width-indent) {
		if i > 0 {
			line = strings.Repeat(" ", indent) + line
		}
		w.line("%s", line)
	}
}

func (w *whyWriter) write(a *why.Answer) {
	age := ""
	if since := since(a.Since, w.now); since != "" {
		age = ", for " + since
	}
	if !a.Waits {
		w.text(2, fmt.Sprintf("%s %s %s%s, %s", a.Pod, phaseVerb(a.Phase), a.Node, age, a.Reason))
	} else {
		w.text(2, fmt.Sprintf("%s is %s%s: %s", a.Pod, cmp.Or(a.Phase, "Pending"), age, a.Reason))
	}
	for i := range a.Asked {
		w.line("")
		w.writeRequest(a, &a.Asked[i])
	}
	w.writeRefusals(a)
	if len(a.Fits) > 0 && a.SchedulerMessage != "" {
		w.line("")
		w.text(2, "message of the scheduler: "+a.SchedulerMessage)
	}
	if a.Warning != "" {
		w.line("")
		w.text(2, "last warning: "+a.Warning)
	}
	if a.Nearest != nil {
		w.line("")
		w.writeNearest(a.Nearest)
	}
	if len(a.Fix) > 0 {
		w.line("")
		word := "fix"
		for _, command := range a.Fix {
			for _, line := range terminal.BreakCommand(terminal.SafeText(command), w.style.Width-fixIndent) {
				w.line("  %-5s  %s", word, line)
				word = ""
			}
		}
	}
}

// fixIndent is the width of the column before commands.
const fixIndent = 9

func phaseVerb(phase string) string {
	switch corev1.PodPhase(phase) {
	case corev1.PodRunning:
		return "runs on"
	case corev1.PodPending:
		return "starts on"
	}
	return "has ended on"
}

// writeRequest writes a request with the result of each step, or the devices that the pod has.
func (w *whyWriter) writeRequest(a *why.Answer, r *why.Request) {
	w.text(2, title(a, r))
	for i, step := range r.Steps {
		if i == 0 {
			w.writeFirst(&step)
			continue
		}
		w.writeStep(r, &step)
	}
	if len(r.Steps) > 0 {
		left := fmt.Sprintf("%6d  left", r.Left)
		if r.But != "" {
			left += ", " + r.But
		}
		w.writeIndented(left)
	}
	for i := range r.Has {
		w.has(r, &r.Has[i])
	}
}

// title describes a request in one line.
func title(a *why.Answer, r *why.Request) string {
	count := fmt.Sprint(r.Count)
	if r.All {
		count = "all"
	}
	var text string
	switch {
	case r.Claim == "" && r.Class == "":
		return fmt.Sprintf("limits %s: %s of a device plugin", r.Resource, count)
	case r.Resource != "":
		text = fmt.Sprintf("limits %s: %s of class %s", r.Resource, count, r.Class)
	default:
		text = fmt.Sprintf("request %s: %s of %s", r.Name, count, r.Class)
		if slices.ContainsFunc(a.Asked, func(other why.Request) bool { return other.Claim != r.Claim }) {
			text = fmt.Sprintf("claim %s, %s", r.Claim, text)
		}
	}
	for _, rule := range r.Rules {
		text += " " + rule
	}
	if r.Admin {
		text += ", for administration"
	}
	return text
}

// writeFirst writes the number of all devices. If there are none, it adds the reason.
func (w *whyWriter) writeFirst(step *why.Step) {
	separator := ", "
	switch {
	case step.Detail == "":
		separator = ""
	case step.Devices == 0:
		separator = ": "
	}
	w.writeIndented(fmt.Sprintf("%6d  %s%s%s", step.Devices, step.What, separator, step.Detail))
}

// writeIndented writes a text that begins with a number, with its other lines below the text.
func (w *whyWriter) writeIndented(text string) {
	number, rest := text[:8], text[8:]
	for i, line := range terminal.WrapText(breakWords(terminal.SafeText(rest), w.style.Width-8), w.style.Width-8) {
		if i > 0 {
			number = strings.Repeat(" ", 8)
		}
		w.line("%s%s", number, line)
	}
}

// breakWords splits words that are longer than a line, such as CEL expressions: after a bracket or
// comma, before a dot, or otherwise at the end of the line.
func breakWords(text string, columns int) string {
	var out []string
	for word := range strings.FieldsSeq(text) {
		for terminal.Columns(word) > columns {
			at := strings.LastIndexAny(word[:columns], ".(,")
			switch {
			case at <= 0:
				at = columns
				for !utf8.RuneStart(word[at]) {
					at--
				}
			case word[at] != '.':
				at++
			}
			out = append(out, word[:at])
			word = word[at:]
		}
		out = append(out, word)
	}
	return strings.Join(out, " ")
}

// whatWidth limits the width of the column with the conditions.
const whatWidth = 38

// writeStep writes the number of devices that a condition excludes. Long conditions have lines of
// their own.
func (w *whyWriter) writeStep(r *why.Request, step *why.Step) {
	column := 0
	for _, s := range r.Steps[1:] {
		if n := terminal.Columns(s.What); n <= whatWidth {
			column = max(column, n)
		}
	}
	detail := terminal.SafeText(strings.TrimSpace(step.Detail))
	if terminal.Columns(step.What) > whatWidth {
		w.writeIndented(fmt.Sprintf("%6d  %s", step.Devices, step.What))
		if detail != "" {
			w.line("          %s", w.style.Cut(detail, w.style.Width-10))
		}
		return
	}
	w.line("%6d  %s  %s", step.Devices, w.style.PadText(terminal.SafeText(step.What), column), w.style.Cut(detail, w.style.Width-10-column))
}

// has writes a device that the pod has.
func (w *whyWriter) has(r *why.Request, d *fleet.Device) {
	words := []string{bareLabel(d), d.Model}
	for _, rule := range r.Rules {
		if attribute, is := strings.CutPrefix(rule, "on one "); is {
			if value := fleet.Text(&d.Spec, resourceapi.QualifiedName(attribute)); value != "" {
				_, name, _ := strings.Cut(attribute, "/")
				words = append(words, name+" "+value)
			}
		}
	}
	w.line("     %s %s", w.style.Glyph(deviceGlyph(d)), w.style.Cut(terminal.SafeText(strings.Join(words, "   ")), w.style.Width-7))
}

func bareLabel(d *fleet.Device) string { return strings.TrimPrefix(d.Label, d.Kind+" ") }

// writeRefusals writes the nodes on which the pod may not run, with the reasons.
func (w *whyWriter) writeRefusals(a *why.Answer) {
	if len(a.Nodes) == 0 {
		return
	}
	w.line("")
	for _, r := range a.Nodes {
		names := strings.Join(r.Nodes[:min(len(r.Nodes), 3)], ", ")
		if n := len(r.Nodes) - 3; n > 0 {
			names += fmt.Sprintf(" and %d more", n)
		}
		w.text(2, fmt.Sprintf("not on %s: %s", names, r.Why))
	}
}

// writeNearest writes the place where the fewest devices are missing, with the devices there.
func (w *whyWriter) writeNearest(n *why.Nearest) {
	w.text(2, fmt.Sprintf("nearest: %s, has %d", n.Where, n.Has))
	line, columns := "", 0
	for i := range n.Devices {
		d := &n.Devices[i]
		text := bareLabel(&d.Device)
		if d.Why != "" {
			text += " " + d.Why
			if age := w.taintAge(&d.Device); age != "" {
				text += ", " + age
			}
		}
		text = w.style.Cut(terminal.SafeText(text), w.style.Width-7)
		if columns > 0 && columns+5+terminal.Columns(text) > w.style.Width {
			w.line("%s", line)
			line, columns = "", 0
		}
		gap := "   "
		if columns == 0 {
			gap = "     "
		}
		line += gap + w.style.Glyph(deviceGlyph(&d.Device)) + " " + text
		columns += len(gap) + 2 + terminal.Columns(text)
	}
	if line != "" {
		w.line("%s", line)
	}
}

// taintAge returns the time since a device was tainted, "" if unknown.
func (w *whyWriter) taintAge(d *fleet.Device) string {
	for _, taint := range d.Taints {
		if fleet.BlocksPods(taint.Effect) {
			return since(taint.Since, w.now)
		}
	}
	return ""
}
