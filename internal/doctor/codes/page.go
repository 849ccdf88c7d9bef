package codes

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"chandler.dev/internal/terminal"
)

// severity returns the severity of a code as a word.
func (c Code) severity() string {
	if c.Result == Warning {
		return "warning"
	}
	return "error"
}

// WriteExplanation writes an explanation of a code for people.
func (c Code) WriteExplanation(out io.Writer, style terminal.Style) error {
	var b strings.Builder
	for _, line := range terminal.WrapText(fmt.Sprintf("%s  %s (%s, %s)", c.ID, c.Says, c.Category(), c.severity()), style.Width) {
		fmt.Fprintln(&b, style.PaintText(terminal.Strong, line))
	}
	for _, part := range []struct{ title, text string }{
		{"Checks", c.Looks}, {"Cause", c.Comes}, {"Why it matters", c.Why},
	} {
		fmt.Fprintf(&b, "\n%s\n", part.title)
		for _, line := range terminal.WrapText(part.text, style.Width-2) {
			fmt.Fprintf(&b, "  %s\n", line)
		}
	}
	fmt.Fprint(&b, "\nFix\n")
	for _, fix := range c.Fixes {
		for i, line := range terminal.BreakCommand(fix.Command, style.Width-4) {
			prompt := "$"
			if i > 0 {
				prompt = " " // the rest of the command, for which a shell prints no such prompt
			}
			fmt.Fprintf(&b, "  %s %s\n", prompt, line)
		}
		for _, line := range terminal.WrapText(fix.explainFix(), style.Width-6) {
			fmt.Fprintf(&b, "      %s\n", line)
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// ListCodes writes all codes, one per line.
func ListCodes(out io.Writer, style terminal.Style) error {
	var b strings.Builder
	last := Category("")
	for _, c := range Codes() {
		if c.Category() != last {
			if last != "" {
				fmt.Fprintln(&b)
			}
			last = c.Category()
			fmt.Fprintln(&b, style.PaintText(terminal.Strong, string(last)))
		}
		fmt.Fprintf(&b, "  %s %s  %s\n", style.Glyph(c.Result.Glyph()), c.ID, style.Cut(c.Says, style.Width-12))
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// explainFix returns the effect of a command, including the effect on others.
func (f Fix) explainFix() string {
	if how := disturbanceOf(f.Command); how != "" {
		return fmt.Sprintf("%s Effect on others: %s.", f.Does, how)
	}
	return f.Does
}

// Page returns the code's page of the documentation, in Markdown.
func (c Code) Page() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s: %s\n\n", c.ID, c.Says)
	fmt.Fprintf(&b, "Category: %s. Result: %s.\n\n", c.Category(), c.severity())
	fmt.Fprintf(&b, "**What is checked.** %s\n\n**Cause.** %s\n\n**Why it matters.** %s\n\n## Fix\n\n", c.Looks, c.Comes, c.Why)
	for _, fix := range c.Fixes {
		fmt.Fprintf(&b, "```sh\n%s\n```\n\n%s\n\n", fix.Command, fix.explainFix())
	}
	b.WriteString("Words in capitals are placeholders. `chandler doctor` prints these commands with the names of your cluster.\n\n## Symptoms\n\n")
	for _, s := range c.Symptoms {
		fmt.Fprintf(&b, "- [%s](../troubleshooting.md#%s)\n", s, headingAnchor(string(s)))
	}
	return b.String()
}

// Index returns the page with all codes, in Markdown.
func Index() string {
	var b strings.Builder
	b.WriteString("# Codes of chandler doctor\n\n`chandler doctor` prints a code with each fault that it finds. Each code has a page with its cause and the commands that fix it.\n`chandler explain CODE` prints the same text. The meaning of a code never changes. The first two digits are the category.\n\n| code | fault | result |\n|---|---|---|\n")
	for _, c := range Codes() {
		fmt.Fprintf(&b, "| [%s](%s.md) | %s | %s |\n", c.ID, c.ID, c.Says, c.severity())
	}
	return b.String()
}

// likeliest are the most frequent causes of each symptom, which are listed first.
var likeliest = map[Symptom][]string{
	ClaimPending:   {"CH0610", "CH0609", "CH0613"},
	LimitsPending:  {"CH0603", "CH0609", "CH0104"},
	Creating:       {"CH0701", "CH0103", "CH0611"},
	WithoutDevice:  {"CH0202", "CH0305", "CH0206"},
	DeviceMissing:  {"CH0304", "CH0305", "CH0301"},
	DeviceSlow:     {"CH0307", "CH0306"},
	Terminating:    {"CH0701", "CH0102", "CH0502"},
	AgentDown:      {"CH0703", "CH0605", "CH0103"},
	NoEffect:       {"CH0703", "CH0502", "CH0313"},
	AfterARestart:  {"CH0304", "CH0403", "CH0605"},
	WrongEverybody: {"CH0110", "CH0606"},
}

// firstCauses is the number of causes that the troubleshooting page describes for each
// symptom. The page links the other causes.
const firstCauses = 3

const troubleshootingIntro = "# Troubleshooting\n\n" +
	"This page helps you to find the cause of a fault by its symptom.\n\n" +
	"**1. Run `chandler doctor`.** It detects all faults on this page, and prints their causes and the commands that fix\n" +
	"them. Run it in the agent's pod on the affected node:\n\n" +
	"```sh\nkubectl -n chandler get pods -o wide\nkubectl -n chandler exec POD -- /chandler doctor\n```\n\n" +
	"In the pod, doctor cannot read the container runtime's configuration. On the node, it can:\n" +
	"[Doctor](doctor.md#run-doctor) describes how to run it there, and its output.\n\n" +
	"**2. If a pod stays Pending**, [`kubectl chandler why`](kubectl.md#find-out-why-a-pod-is-pending-why) counts the\n" +
	"devices that each part of its request excludes:\n\n" +
	"```sh\nkubectl chandler why POD\n```\n\n" +
	"**3. If you cannot run doctor**, look up the symptom below. The most likely faults are first. The page of each code\n" +
	"describes the check, the cause and the fix.\n\n" +
	"## The most frequent faults of a new installation\n\n" +
	"| symptom | first check | fault and fix |\n|---|---|---|\n" +
	"| Pods of the agent are in `ErrImagePull` or `ImagePullBackOff` | `kubectl -n chandler describe pods` | The nodes cannot get the image: [build and push it](install.md#build-and-push-the-image) |\n" +
	"| The DaemonSet has no pods | `kubectl -n chandler describe daemonset chandler` | `violates PodSecurity`: [label the namespace](install.md#requirements). Otherwise, the node selector selects no node |\n" +
	"| A pod starts, and its container has no device | `sudo grep -r cdi /etc/containerd` on the node | [CH0202](codes/CH0202.md): CDI is off in the container runtime. [Enable it](platforms/index.md#find-out-whether-cdi-is-enabled) |\n" +
	"| `libcuda.so.1` or `nvidia-smi` is missing in a container | `kubectl get pod POD -o jsonpath={.spec.runtimeClassName}` | [Choose how containers get the driver's files](verify-installation.md#3-if-it-fails) |\n" +
	"| A claim that selects the memory of an NVIDIA GPU stays Pending | `kubectl chandler why POD` | [CH0617](codes/CH0617.md): the memory is not known without NVML. [Enable it](nvidia.md#enable-nvml) |\n" +
	"| Two pods got the same GPU | `kubectl get daemonsets --all-namespaces` | [CH0104](codes/CH0104.md): another device plugin still runs |\n\n" +
	"To get help from others, create an archive with [`kubectl chandler report`](kubectl.md#collect-diagnostics-report).\n"

// TroubleshootingPage returns the page with the faults by symptom, in Markdown.
func TroubleshootingPage() string {
	var b strings.Builder
	b.WriteString(troubleshootingIntro)
	for _, s := range Symptoms() {
		var codes []Code
		for _, c := range Codes() {
			if slices.Contains(c.Symptoms, s) {
				codes = append(codes, c)
			}
		}
		rank := func(c Code) int {
			if at := slices.Index(likeliest[s], c.ID); at >= 0 {
				return at - len(likeliest[s])
			}
			return int(Failed - c.Result)
		}
		slices.SortStableFunc(codes, func(a, b Code) int { return rank(a) - rank(b) })
		fmt.Fprintf(&b, "\n## %s\n\n| fault | likely cause |\n|---|---|\n", s)
		for _, c := range codes[:min(len(codes), firstCauses)] {
			fmt.Fprintf(&b, "| [%s](codes/%s.md): %s | %s |\n", c.ID, c.ID, c.Says, c.Comes)
		}
		if len(codes) > firstCauses {
			b.WriteString("\nOther possible faults:\n\n")
			for _, c := range codes[firstCauses:] {
				fmt.Fprintf(&b, "- [%s](codes/%s.md): %s\n", c.ID, c.ID, c.Says)
			}
		}
	}
	return b.String()
}

// headingAnchor returns the anchor of a heading, as generated by GitHub and MkDocs.
func headingAnchor(heading string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-':
			return r
		}
		return -1
	}, strings.ToLower(heading))
}
