package report

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/terminal"
)

// Print writes the report for people. If quiet is set, Print omits passed checks and lists the
// skipped checks of a node without reasons.
func (r *Report) Print(out io.Writer, style terminal.Style, quiet bool) error {
	var b strings.Builder
	fmt.Fprintln(&b, strings.Join(r.Head.headWords(), "   "))
	for _, s := range r.Sections {
		s.print(&b, style, quiet)
	}
	if quiet && r.Head.Source == "" { // no command adds information to a recording or a copy
		r.notQueried(&b, style)
	}
	fmt.Fprintln(&b)
	fmt.Fprintln(&b, r.footLine(style))
	_, err := io.WriteString(out, b.String())
	return err
}

// notQueried lists the skipped checks in one paragraph.
func (r *Report) notQueried(b *strings.Builder, style terminal.Style) {
	var names []string
	for _, s := range r.Sections {
		for _, f := range s.Findings {
			if f.Code == "" && f.Result == codes.NotQueried {
				name, _, _ := strings.Cut(f.Text, ":")
				if !slices.Contains(names, name) {
					names = append(names, name)
				}
			}
		}
	}
	if len(names) == 0 {
		return
	}
	fmt.Fprintln(b)
	text := "not checked: " + strings.Join(names, "; ") + ". Without --quiet, doctor prints the reasons. Run it as root on the node for most checks."
	for _, line := range terminal.WrapText(terminal.SafeText(text), style.Width) {
		fmt.Fprintln(b, line)
	}
}

func (h Head) headWords() []string {
	kubernetes := "no Kubernetes"
	switch {
	case h.Source != "":
		kubernetes = h.Source
	case h.Kubernetes != "":
		kubernetes = "Kubernetes " + strings.TrimPrefix(h.Kubernetes, "v")
	}
	return []string{terminal.SafeText(h.Node), terminal.SafeText(kubernetes), "Chandler " + h.Version, h.Time.UTC().Format("2006-01-02 15:04:05 UTC")}
}

func (s Section) print(b *strings.Builder, style terminal.Style, quiet bool) {
	begun := false
	for _, f := range s.Findings {
		if quiet && f.Code == "" {
			continue
		}
		if !begun {
			fmt.Fprintf(b, "\n%s\n", style.PaintText(terminal.Strong, string(s.Category)))
			begun = true
		}
		f.print(b, style)
	}
}

const (
	textIndent  = 4  // indentation of a finding's text
	underIndent = 13 // indentation of a cause and of commands
)

func (f Finding) print(b *strings.Builder, style terminal.Style) {
	width := style.Width - textIndent
	if f.Code != "" {
		width -= len(f.Code) + 1
	}
	lines := terminal.WrapText(terminal.SafeText(f.Text), width)
	for i, line := range lines {
		switch {
		case i == 0 && f.Code != "":
			fmt.Fprintf(b, "  %s %s%s %s\n", style.Glyph(f.Result.Glyph()), line, strings.Repeat(" ", max(0, width-terminal.Columns(line))), f.Code)
		case i == 0:
			fmt.Fprintf(b, "  %s %s\n", style.Glyph(f.Result.Glyph()), line)
		default:
			fmt.Fprintf(b, "    %s\n", line)
		}
	}
	writeUnder(b, "cause", terminal.WrapText(terminal.SafeText(f.Cause), style.Width-underIndent))
	var commands []string
	for _, command := range f.Fix {
		commands = append(commands, terminal.BreakCommand(terminal.SafeText(command), style.Width-underIndent)...)
	}
	writeUnder(b, "fix", commands)
}

// writeUnder writes lines below a finding, with a word before the first line.
func writeUnder(b *strings.Builder, word string, lines []string) {
	for _, line := range lines {
		fmt.Fprintf(b, "      %-7s%s\n", word, line)
		word = ""
	}
}

// footLine returns the last line: the number of findings by result, and a command for further
// reading.
func (r *Report) footLine(style terminal.Style) string {
	var parts []string
	for _, result := range []codes.Result{codes.OK, codes.Warning, codes.Failed} {
		parts = append(parts, fmt.Sprintf("%d %s", r.Count(result), style.BareGlyph(result.Glyph())))
	}
	if n := r.Count(codes.NotQueried); n > 0 {
		parts = append(parts, fmt.Sprintf("%d not checked", n))
	}
	foot := strings.Join(parts, "   ")
	worst := r.worstCode()
	if worst == "" {
		return foot
	}
	hint := "chandler explain " + worst
	return foot + strings.Repeat(" ", max(3, style.Width-terminal.Columns(foot)-len(hint))) + hint
}

// worstCode returns the code to read first, or "" without faults.
func (r *Report) worstCode() (code string) {
	for _, result := range []codes.Result{codes.Failed, codes.Warning} {
		if f, found := r.firstFinding(result); found {
			return f.Code
		}
	}
	return ""
}

// MarshalJSON returns the format of "linkerd check -o json", extended by codes, causes and
// fixes.
func (r *Report) MarshalJSON() ([]byte, error) {
	type checkJSON struct {
		Description string   `json:"description"`
		Result      string   `json:"result"`
		Code        string   `json:"code,omitempty"`
		Cause       string   `json:"cause,omitempty"`
		Fix         []string `json:"fix,omitempty"`
	}
	type categoryJSON struct {
		Name   string      `json:"categoryName"`
		Checks []checkJSON `json:"checks"`
	}
	out := struct {
		Success    bool           `json:"success"`
		Node       string         `json:"node"`
		Kubernetes string         `json:"kubernetes,omitempty"`
		Version    string         `json:"version"`
		Time       time.Time      `json:"time"`
		Categories []categoryJSON `json:"categories"`
	}{r.IsHealthy(false), r.Head.Node, r.Head.Kubernetes, r.Head.Version, r.Head.Time.UTC().Truncate(time.Second), []categoryJSON{}}
	results := [...]string{codes.NotQueried: "skipped", codes.OK: "success", codes.Warning: "warning", codes.Failed: "error"}
	for _, s := range r.Sections {
		category := categoryJSON{Name: string(s.Category), Checks: []checkJSON{}}
		for _, f := range s.Findings {
			category.Checks = append(category.Checks, checkJSON{f.Text, results[f.Result], f.Code, f.Cause, f.Fix})
		}
		out.Categories = append(out.Categories, category)
	}
	return json.Marshal(out)
}
