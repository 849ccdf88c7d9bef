package kubectl

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/cmd/kubectl-chandler/kubectl/cluster"
	"chandler.dev/internal/fleet"
	"chandler.dev/internal/terminal"
)

func newTop(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "top [models | nodes]",
		Short: "Print how many accelerators of each model, or of each node, are free",
		Long: `Print the accelerators of the cluster and how many of them are free, by model or by
node. FREE counts the devices that a new pod can get, ALLOCATED those with a consumer,
and UNAVAILABLE the remaining ones, which are unhealthy or move to the other API. A
partition of a GPU is allocated while the whole GPU is, and the whole GPU while one of
its partitions is. A device that is shared by number counts once for each share. The
virtual functions of an adapter count each, although they are one device in the
ResourceSlice. The sums of nodes omit devices with unlimited sharing, such as /dev/kvm.

Devices of device plugins are in rows of the kind "plugin", by the name of their
resource. The API server has no other information about them.`,
		Example: `  kubectl chandler top
  kubectl chandler top nodes
  kubectl chandler top -o json | jq '.models[] | select(.free > 0)'`,
		Args:      cobra.MatchAll(cobra.MaximumNArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{"models", "nodes"},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.checkOutput(); err != nil {
				return err
			}
			v, err := o.read(cmd.Context(), cmd, cluster.Reading{})
			if err != nil {
				return err
			}
			top := topOf(fleet.BuildFleet(v.Input, driverName))
			switch {
			case o.output == "json":
				return writeJSON(cmd.OutOrStdout(), top)
			case len(args) == 1 && args[0] == "nodes":
				top.writeNodes(cmd.OutOrStdout(), o.style(cmd), v.Now)
			default:
				top.writeModels(cmd.OutOrStdout(), o.style(cmd))
			}
			return nil
		},
	}
	o.addFlags(cmd.Flags())
	o.addOutput(cmd.Flags())
	return cmd
}

func writeJSON(out io.Writer, value any) error {
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}

// counts are numbers of devices by state. Free, Held and Out add up to All.
type counts struct {
	Free int64 `json:"free"`
	Held int64 `json:"allocated"`
	Out  int64 `json:"unavailable"`
	All  int64 `json:"total"`
	Open int64 `json:"shareable,omitempty"` // part of All: devices with unlimited sharing

	glyphs map[terminal.Glyph]int64
}

func (c *counts) add(d *fleet.Device) {
	allocated, rest := d.CountAllocated()
	c.Held += allocated
	c.All += allocated + rest
	switch d.State {
	case fleet.Out:
		c.Out += rest
	case fleet.Open:
		c.Open += rest
		c.Free += rest
	default:
		c.Free += rest
	}
	glyph := deviceGlyph(d)
	if glyph == terminal.Partly && d.Shares > 0 {
		c.draw(terminal.Held, allocated)
		c.draw(terminal.Free, rest)
		return
	}
	c.draw(glyph, allocated+rest)
}

func (c *counts) addResource(r *fleet.Resource) {
	if r.Open() {
		c.addOpen(r)
		return
	}
	c.Free += r.Free()
	c.Held += r.Held
	c.Out += r.Unavailable()
	c.All += r.Free() + r.Held + r.Unavailable()
	c.draw(terminal.Free, r.Free())
	c.draw(terminal.Held, r.Held)
	c.draw(terminal.Unhealthy, r.Unavailable())
}

// addOpen adds a resource that stands for one device with unlimited sharing.
func (c *counts) addOpen(r *fleet.Resource) {
	c.All++
	switch {
	case r.Allocatable == 0:
		c.Out++
		c.draw(terminal.Unhealthy, 1)
		return
	case r.Held > 0:
		c.draw(terminal.OpenHeld, 1)
	default:
		c.draw(terminal.Open, 1)
	}
	c.Open++
	c.Free++
}

func (c *counts) draw(g terminal.Glyph, n int64) {
	if c.glyphs == nil {
		c.glyphs = make(map[terminal.Glyph]int64)
	}
	c.glyphs[g] += n
}

// modelRow is a model with the numbers of its devices.
type modelRow struct {
	Kind   string            `json:"kind"`
	Model  string            `json:"model"`
	Memory resource.Quantity `json:"memory,omitzero"`
	counts
}

// nodeRow is a node with the numbers of its devices.
type nodeRow struct {
	Node  string            `json:"node"`
	Kinds []kindRow         `json:"kinds"`
	Sick  []unhealthyDevice `json:"unhealthy,omitempty"`
	counts
}

// kindRow counts the devices of one kind on a node. Partitions of one physical device are grouped.
type kindRow struct {
	Kind string `json:"kind"`
	counts
	silicon map[string]*counts
	order   []string
}

// unhealthyDevice describes an unhealthy device.
type unhealthyDevice struct {
	Device string        `json:"device"` // its label
	Name   string        `json:"name"`
	Taints []fleet.Taint `json:"taints"`
}

type topView struct {
	Models []modelRow `json:"models"`
	Nodes  []nodeRow  `json:"nodes"`
}

// kindOfPlugins is the kind of rows for device plugin resources.
const kindOfPlugins = "plugin"

// topOf counts the devices of a fleet.
func topOf(f *fleet.Fleet) *topView {
	models, nodes := make(map[string]*modelRow), make(map[string]*nodeRow)
	for i := range f.Devices {
		d := &f.Devices[i]
		memory := formatGibibytes(d.Memory)
		entry(models, d.Kind+"\x00"+d.Model+"\x00"+memory, modelRow{Kind: d.Kind, Model: d.Model, Memory: d.Memory}).add(d)
		node := entry(nodes, d.Node, nodeRow{Node: d.Node})
		node.add(d)
		node.kind(d.Kind).addPart(d)
		if len(d.Taints) > 0 {
			node.Sick = append(node.Sick, unhealthyDevice{d.Label, d.Device, d.Taints})
		}
	}
	for i := range f.Resources {
		r := &f.Resources[i]
		entry(models, kindOfPlugins+"\x00"+r.Name, modelRow{Kind: kindOfPlugins, Model: r.Name}).addResource(r)
		node := entry(nodes, r.Node, nodeRow{Node: r.Node})
		node.addResource(r)
		node.kind(r.Name).addResource(r)
	}
	top := new(topView)
	for _, m := range models {
		top.Models = append(top.Models, *m)
	}
	for _, n := range nodes {
		top.Nodes = append(top.Nodes, *n)
	}
	slices.SortFunc(top.Models, func(a, b modelRow) int {
		return cmp.Or(cmp.Compare(kindRank(a.Kind), kindRank(b.Kind)), strings.Compare(a.Kind, b.Kind), -a.Memory.Cmp(b.Memory), strings.Compare(a.Model, b.Model))
	})
	slices.SortFunc(top.Nodes, func(a, b nodeRow) int { return strings.Compare(a.Node, b.Node) })
	return top
}

func entry[V any](rows map[string]*V, key string, blank V) *V {
	if rows[key] == nil {
		rows[key] = &blank
	}
	return rows[key]
}

// kindRank orders kinds: the most requested kinds first, device plugin resources last.
func kindRank(kind string) int {
	kinds := []string{"gpu", "npu", "fpga", "nic", "dma", "crypto", "enclave", "virtualization", "other", kindOfPlugins}
	if i := slices.Index(kinds, kind); i >= 0 {
		return i
	}
	return len(kinds)
}

func (n *nodeRow) kind(kind string) *kindRow {
	for i := range n.Kinds {
		if n.Kinds[i].Kind == kind {
			return &n.Kinds[i]
		}
	}
	n.Kinds = append(n.Kinds, kindRow{Kind: kind, silicon: make(map[string]*counts)})
	return &n.Kinds[len(n.Kinds)-1]
}

func (k *kindRow) addPart(d *fleet.Device) {
	k.add(d)
	if k.silicon[d.Silicon] == nil {
		k.silicon[d.Silicon] = new(counts)
		k.order = append(k.order, d.Silicon)
	}
	k.silicon[d.Silicon].add(d)
}

// writeModels prints a line for each model.
func (t *topView) writeModels(out io.Writer, style terminal.Style) {
	if len(t.Models) == 0 {
		fmt.Fprintln(out, "No accelerators are offered.")
		return
	}
	rows := terminal.Table{Columns: []terminal.Column{{Title: "KIND"}, {Title: "MODEL", Least: 12}, {Title: "MEMORY", Right: true}, {Title: "FREE", Right: true}, {Title: "ALLOCATED", Right: true}, {Title: "UNAVAILABLE", Right: true}, {Title: "TOTAL", Right: true}}}
	for _, m := range t.Models {
		rows.AddRow(terminal.TextCell(m.Kind), terminal.TextCell(m.Model), terminal.TextCell(formatGibibytes(m.Memory)), m.freeCell(), terminal.NumberCell(m.Held), terminal.NumberCell(m.Out), terminal.NumberCell(m.All))
	}
	if style.Width < wideWidth {
		rows = withoutColumns(rows, "KIND") // leaves room for the profiles of partitions
		_ = rows.Print(out, style)
		return
	}
	room := style.Width
	for _, w := range rows.ColumnWidths(terminal.Unlimited) {
		room -= w + 2
	}
	rows.Columns = append(rows.Columns, terminal.Column{})
	for i, m := range t.Models {
		rows.Rows[i] = append(rows.Rows[i], drawStrip(style, m.glyphs, min(stripLength, max(stripLength/2, room))))
	}
	_ = rows.Print(out, style)
}

// freeCell returns the number of free devices, "any" if all devices have unlimited sharing.
func (c *counts) freeCell() terminal.Cell {
	if c.Open > 0 && c.Open == c.All {
		return terminal.TextCell("any")
	}
	return terminal.NumberCell(c.Free)
}

// freeDevices returns the number of free devices without those with unlimited sharing, "any" if all
// devices of the node have unlimited sharing.
func (n *nodeRow) freeDevices() terminal.Cell {
	if n.Open > 0 && n.Open == n.All {
		return terminal.TextCell("any")
	}
	return terminal.NumberCell(n.Free - n.Open)
}

// wideWidth is the terminal width from which on the devices of models, and the health of the
// devices of nodes, are shown.
const wideWidth = 100

// writeNodes prints a line for each node.
func (t *topView) writeNodes(out io.Writer, style terminal.Style, now time.Time) {
	if len(t.Nodes) == 0 {
		fmt.Fprintln(out, "No accelerators are offered.")
		return
	}
	rows := terminal.Table{Columns: []terminal.Column{{Title: "NODE", Least: 12}, {Title: "FREE", Right: true}, {Title: "ALLOCATED", Right: true}, {Title: "UNAVAILABLE", Right: true}, {Least: 20}}}
	wide := style.Width >= wideWidth
	if wide {
		rows.Columns = append(rows.Columns, terminal.Column{Title: "HEALTH", Least: 12})
	}
	for i := range t.Nodes {
		n := &t.Nodes[i]
		room := style.Width - 46
		if wide {
			room = style.Width / 2
		}
		cells := []terminal.Cell{terminal.TextCell(n.Node), n.freeDevices(), terminal.NumberCell(n.Held), terminal.NumberCell(n.Out), n.drawStrips(style, room)}
		if wide {
			cells = append(cells, terminal.TextCell(n.healthText(now)))
		}
		rows.AddRow(cells...)
	}
	_ = rows.Print(out, style)
}

// drawStrips draws the devices of a node by kind, as far as there is room.
func (n *nodeRow) drawStrips(style terminal.Style, room int) terminal.Cell {
	slices.SortStableFunc(n.Kinds, func(a, b kindRow) int { return cmp.Compare(kindRank(a.Kind), kindRank(b.Kind)) })
	var whole terminal.Cell
	for i := range n.Kinds {
		k := &n.Kinds[i]
		if k.Open == k.All {
			continue // devices with unlimited sharing, such as /dev/kvm
		}
		part := k.drawStrip(style)
		gap := ""
		if whole.Text != "" {
			gap = "  "
		}
		if terminal.Columns(whole.Text+gap+part.Text) > room && whole.Text != "" {
			more := fmt.Sprintf("%s+%d", gap, len(n.Kinds)-i)
			return terminal.Cell{Text: whole.Text + more, Painted: whole.Painted + more}
		}
		whole = terminal.Cell{Text: whole.Text + gap + part.Text, Painted: whole.Painted + gap + part.Painted}
	}
	return whole
}

// drawStrip draws the devices of one kind: a glyph for each, grouped by physical device. Many
// devices are summarised in words.
func (k *kindRow) drawStrip(style terminal.Style) terminal.Cell {
	kind := terminal.SafeText(k.Kind) + " "
	if k.All > stripLength {
		text := fmt.Sprintf("%s%d, %d allocated", kind, k.All, k.Held)
		if k.Out > 0 {
			text += fmt.Sprintf(", %d out", k.Out)
		}
		return terminal.Cell{Text: text, Painted: text}
	}
	out := terminal.Cell{Text: kind, Painted: kind}
	parts := []*counts{&k.counts}
	if len(k.order) > 1 {
		parts = nil
		for _, silicon := range k.order {
			parts = append(parts, k.silicon[silicon])
		}
	}
	for i, part := range parts {
		if i > 0 {
			out.Text, out.Painted = out.Text+" ", out.Painted+" "
		}
		drawn := drawStrip(style, part.glyphs, stripLength)
		out.Text, out.Painted = out.Text+drawn.Text, out.Painted+drawn.Painted
	}
	return out
}

// healthText lists the unhealthy devices with their conditions.
func (n *nodeRow) healthText(now time.Time) string {
	var all []string
	for _, s := range n.Sick {
		for _, taint := range s.Taints {
			all = append(all, strings.TrimSpace(s.Device+" "+taint.Condition+" "+since(taint.Since, now)))
		}
	}
	return strings.Join(all, ", ")
}

// since returns the time since t, "" if t is unknown.
func since(t, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	return terminal.FormatAge(now.Sub(t))
}

// formatGibibytes formats an amount of memory.
func formatGibibytes(q resource.Quantity) string {
	if q.IsZero() {
		return ""
	}
	value := float64(q.Value())
	for _, unit := range []string{"B", "KiB", "MiB", "GiB"} {
		if value < 1024 || unit == "GiB" {
			return strings.TrimSuffix(fmt.Sprintf("%.1f", value), ".0") + " " + unit
		}
		value /= 1024
	}
	return ""
}
