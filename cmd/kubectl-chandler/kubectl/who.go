package kubectl

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"chandler.dev/cmd/kubectl-chandler/kubectl/cluster"
	"chandler.dev/discovery"
	"chandler.dev/internal/fleet"
	"chandler.dev/internal/terminal"
)

// driverName is Chandler's name as a DRA driver.
const driverName = discovery.Domain

func newWho(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "who NODE | [NAMESPACE/]POD | DEVICE",
		Short: "Print the consumers of accelerators",
		Long: `Print the consumers of the accelerators of a node or of a device, or the devices of a
pod. A device is selected by its name, PCI address, UUID, serial number or interface,
or by the name of its resource in limits, such as nvidia.com/gpu or gpu. If a word is
the name of a node and of another object, the node is selected; "node/NAME", "pod/NAME"
and "device/NAME" are unambiguous.

Only the agent of a node has the device names of the device plugin API. The command
reads them from the agent's metrics, which requires the permission to get "pods/proxy".
If the agent does not answer, the device of the pod is "?", and "chandler inventory" on
the node shows it.`,
		Example: `  kubectl chandler who gpu-node-07
  kubectl chandler who ml/llama-7b-worker-0
  kubectl chandler who GPU-5e4c9bd6-3f2a-8d1e-9c47-2b61d0f8a7e3
  kubectl chandler who device/1a:00.0 -o json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.checkOutput(); err != nil {
				return err
			}
			v, err := o.read(cmd.Context(), cmd, cluster.Reading{})
			if err != nil {
				return err
			}
			who, err := v.whoHas(args[0])
			if err == nil {
				v.queryAgents(cmd.Context(), who)
			} else {
				offered, unasked := v.findUnlisted(cmd.Context(), args[0])
				switch {
				case offered != nil:
					who = offered
				case unasked != "":
					return fmt.Errorf("%w; %s", err, unasked)
				default:
					return err
				}
			}
			if o.output == "json" {
				return writeJSON(cmd.OutOrStdout(), who)
			}
			who.write(cmd.OutOrStdout(), o.style(cmd), v.Now)
			return nil
		},
		ValidArgsFunction: o.completeNodesAndPods,
	}
	o.addFlags(cmd.Flags())
	o.addOutput(cmd.Flags())
	return cmd
}

// whoView is a list of devices with their consumers.
type whoView struct {
	Node      string           `json:"node,omitempty"`
	Pod       string           `json:"pod,omitempty"`
	Devices   []fleet.Device   `json:"devices"`
	Resources []fleet.Resource `json:"resources,omitempty"`

	answers answers
}

// whoHas returns the view for a word of the command line.
func (v *view) whoHas(word string) (*whoView, error) {
	f := fleet.BuildFleet(v.Input, driverName)
	type look struct {
		prefix string
		find   func(*fleet.Fleet, string) *whoView
	}
	looks := []look{{"node/", v.ofNode}, {"pod/", v.ofPod}, {"device/", v.ofDevice}}
	for _, l := range looks {
		if name, is := strings.CutPrefix(word, l.prefix); is {
			if found := l.find(f, name); found != nil {
				return found, nil
			}
			return nil, fmt.Errorf("%s is not there, or has nothing that may be seen", word)
		}
	}
	for _, l := range looks {
		if found := l.find(f, word); found != nil {
			return found, nil
		}
	}
	return nil, fmt.Errorf("%s is not a node, a pod of namespace %s, or a device: specify a pod of another namespace as NAMESPACE/POD", word, v.Namespace)
}

func (v *view) ofNode(f *fleet.Fleet, name string) *whoView {
	known := slices.Contains(f.NodeNames(), name)
	for i := range v.Nodes {
		known = known || v.Nodes[i].Name == name
	}
	if !known {
		return nil
	}
	return filter(&whoView{Node: name}, f,
		func(d *fleet.Device) bool { return d.Node == name },
		func(r *fleet.Resource) bool { return r.Node == name })
}

func (v *view) ofPod(f *fleet.Fleet, name string) *whoView {
	namespace, pod, qualified := strings.Cut(name, "/")
	if !qualified {
		namespace, pod = v.Namespace, name
	}
	known := false
	for i := range v.Pods {
		known = known || v.Pods[i].Namespace == namespace && v.Pods[i].Name == pod
	}
	if !known {
		return nil
	}
	mine := func(h fleet.Holder) bool { return h.Namespace == namespace && h.Pod == pod }
	found := filter(&whoView{Pod: namespace + "/" + pod}, f,
		func(d *fleet.Device) bool { return slices.ContainsFunc(d.Holders, mine) },
		func(r *fleet.Resource) bool { return slices.ContainsFunc(r.Holders, mine) })
	for i := range found.Resources {
		found.Resources[i].Holders = slices.DeleteFunc(slices.Clone(found.Resources[i].Holders), func(h fleet.Holder) bool { return !mine(h) })
	}
	return found
}

func (v *view) ofDevice(f *fleet.Fleet, name string) *whoView {
	found := filter(&whoView{}, f, func(d *fleet.Device) bool { return d.Is(name) }, func(r *fleet.Resource) bool { return r.Is(name) })
	if len(found.Devices)+len(found.Resources) == 0 {
		return nil
	}
	return found
}

func filter(into *whoView, f *fleet.Fleet, device func(*fleet.Device) bool, resource func(*fleet.Resource) bool) *whoView {
	into.Devices = []fleet.Device{}
	for i := range f.Devices {
		if device(&f.Devices[i]) {
			into.Devices = append(into.Devices, f.Devices[i])
		}
	}
	for i := range f.Resources {
		if resource(&f.Resources[i]) {
			into.Resources = append(into.Resources, f.Resources[i])
		}
	}
	return into
}

// holding is the set of devices that one consumer has by one claim or one resource.
type holding struct {
	fleet.Holder
	node      string
	devices   []*fleet.Device   // empty for the device plugin API
	described []describedDevice // the devices by the device plugin API, if the agent has answered
}

// holdings returns the holdings of all consumers.
func (w *whoView) holdings() (out []*holding) {
	at := make(map[string]*holding)
	for i := range w.Devices {
		d := &w.Devices[i]
		for _, holder := range d.Holders {
			key := strings.Join([]string{holder.Name(), holder.Claim, d.Node}, "\x00")
			if at[key] == nil {
				at[key] = &holding{Holder: holder, node: d.Node}
				out = append(out, at[key])
			}
			at[key].devices = append(at[key].devices, d)
		}
	}
	for _, r := range w.Resources {
		for _, holder := range r.Holders {
			h := &holding{Holder: holder, node: r.Node}
			for _, name := range holder.Devices {
				device, known := w.answers.devices[r.Node][name]
				if !known {
					device.label = name
				}
				h.described = append(h.described, device)
			}
			out = append(out, h)
		}
	}
	slices.SortStableFunc(out, func(a, b *holding) int {
		return cmp.Or(strings.Compare(a.node, b.node), strings.Compare(a.Name(), b.Name()))
	})
	return out
}

// write prints the consumers with their devices, and then free and unhealthy devices.
func (w *whoView) write(out io.Writer, style terminal.Style, now time.Time) {
	rows, wide := w.tableRows(style, now)
	if len(rows.Rows) > 0 {
		if !wide {
			rows = withoutColumns(rows, "MODEL", "REQUEST")
		}
		_ = rows.Print(out, style)
	}
	text := w.summary(style, now)
	if text == "" {
		return
	}
	if len(rows.Rows) > 0 {
		fmt.Fprintln(out)
	}
	for _, line := range terminal.WrapText(text, style.Width) {
		fmt.Fprintln(out, line)
	}
}

// tableRows returns a line for each allocated device. After the first line of a consumer, only the
// differing cells are filled. wide reports whether the style has room for all columns.
func (w *whoView) tableRows(style terminal.Style, now time.Time) (rows terminal.Table, wide bool) {
	rows.Columns = []terminal.Column{{Title: "NODE", Least: 10}, {Title: "POD", Least: 14}, {Title: "DEVICE", Least: 12}, {Title: "MODEL", Least: 12}, {Title: "CLAIM/RESOURCE", Least: 12}, {Title: "REQUEST", Least: 8}, {Title: "API"}, {Title: "AGE", Right: true}}
	for _, h := range w.holdings() {
		by := h.ResourceOrClaim()
		first := []terminal.Cell{terminal.TextCell(h.node), terminal.TextCell(h.Name()), {}, {}, terminal.TextCell(by), {}, terminal.TextCell(h.API()), terminal.TextCell(since(h.Since, now))}
		for i, d := range h.described {
			line := slices.Clone(first)
			if i > 0 {
				line = make([]terminal.Cell, len(first))
			}
			line[2], line[3] = terminal.TextCell(d.label), terminal.TextCell(d.model)
			rows.AddRow(line...)
		}
		if len(h.devices)+len(h.described) == 0 {
			first[2] = timesCell(terminal.TextCell(style.BareGlyph(terminal.Unread)), style, h.Count)
			rows.AddRow(first...)
			continue
		}
		for i, d := range h.devices {
			line := first
			if i > 0 {
				line = make([]terminal.Cell, len(first))
			}
			line = slices.Clone(line)
			own := holderOf(d, &h.Holder)
			line[2], line[3], line[5] = named(style, d), terminal.TextCell(d.Model), terminal.TextCell(own.Request)
			if own.Count > 1 {
				line[2] = timesCell(line[2], style, own.Count)
			}
			rows.AddRow(line...)
		}
	}
	if w.Node != "" || w.Pod != "" {
		rows = withoutColumns(rows, "NODE")
	}
	return rows, style.Width >= wideWidth
}

// holderOf returns the allocation of a device through which a consumer has it by a claim.
func holderOf(d *fleet.Device, h *fleet.Holder) fleet.Holder {
	i := slices.IndexFunc(d.Holders, func(other fleet.Holder) bool { return other.Name() == h.Name() && other.Claim == h.Claim })
	return d.Holders[i]
}

// timesCell returns the cell with a number of devices behind it.
func timesCell(c terminal.Cell, style terminal.Style, n int64) terminal.Cell {
	number := fmt.Sprintf(" ×%d", n)
	if style.ASCII {
		number = fmt.Sprintf(" x%d", n)
	}
	return terminal.Cell{Text: c.Text + number, Painted: cmp.Or(c.Painted, c.Text) + number}
}

// named returns a device's label, with a glyph if the device is unhealthy.
func named(style terminal.Style, d *fleet.Device) terminal.Cell {
	label := terminal.SafeText(d.Label)
	switch g := deviceGlyph(d); g {
	case terminal.Unhealthy, terminal.Unread, terminal.Degraded:
		return terminal.Cell{Text: label + " " + style.BareGlyph(g), Painted: label + " " + style.Glyph(g)}
	}
	return terminal.Cell{Text: label, Painted: label}
}

// withoutColumns returns the table without some columns.
func withoutColumns(t terminal.Table, titles ...string) (out terminal.Table) {
	keep := make([]bool, len(t.Columns))
	for i, c := range t.Columns {
		if keep[i] = !slices.Contains(titles, c.Title); keep[i] {
			out.Columns = append(out.Columns, c)
		}
	}
	for _, row := range t.Rows {
		var cells []terminal.Cell
		for i, c := range row {
			if keep[i] {
				cells = append(cells, c)
			}
		}
		out.AddRow(cells...)
	}
	return out
}

// summary lists the free devices of a node, a pod without devices, and unhealthy devices.
func (w *whoView) summary(style terminal.Style, now time.Time) string {
	var sentences []string
	switch {
	case w.Node != "":
		open := w.open()
		if free := w.freeText(); free != "" {
			sentences = append(sentences, free)
		} else if open == "" {
			sentences = append(sentences, "Nothing is free.")
		}
		if open != "" {
			sentences = append(sentences, open)
		}
	case w.Pod != "" && len(w.Devices)+len(w.Resources) == 0:
		sentences = append(sentences, w.Pod+" has no device.")
	case w.Pod != "":
		sentences = append(sentences, fmt.Sprintf("%s is on %s.", w.Pod, w.holdings()[0].node))
	case w.Pod == "":
		for i := range w.Devices {
			if d := &w.Devices[i]; len(d.Holders) == 0 {
				sentences = append(sentences, fmt.Sprintf("%s on %s: not allocated; %s.", d.Label, d.Node, w.stateText(d)))
			}
		}
		for _, r := range w.Resources {
			if r.Open() {
				sentences = append(sentences, fmt.Sprintf("%s on %s: unlimited sharing.", r.Name, r.Node))
				continue
			}
			sentences = append(sentences, fmt.Sprintf("%s on %s: %d free.", r.Name, r.Node, r.Free()))
		}
	}
	for i := range w.Devices {
		d := &w.Devices[i]
		for _, taint := range d.Taints {
			sentences = append(sentences, fmt.Sprintf("%s %s is %s%s.", style.BareGlyph(deviceGlyph(d)), d.Label, taint.Condition, forAge(taint.Since, now)))
		}
	}
	if text := w.unknownReason(); text != "" {
		sentences = append(sentences, style.BareGlyph(terminal.Unread)+" "+text)
	}
	if n := w.answers.waiting[w.Node]; n > 0 {
		sentences = append(sentences, waitingText(n))
	}
	return terminal.SafeText(strings.Join(sentences, " "))
}

// waitingText gives the number of devices that are not offered at present, and so are counted
// nowhere else.
func waitingText(n int) string {
	if n == 1 {
		return "1 device of this node waits until its consumers release it, and is not offered: run chandler migrate status there."
	}
	return fmt.Sprintf("%d devices of this node wait until their consumers release them, and are not offered: run chandler migrate status there.", n)
}

// forAge returns a phrase for the time since t, "" if t is unknown.
func forAge(t, now time.Time) string {
	if age := since(t, now); age != "" {
		return ", for " + age
	}
	return ""
}

func (w *whoView) stateText(d *fleet.Device) string {
	switch d.State {
	case fleet.Held:
		return "taken, by who has another part of its silicon"
	case fleet.Out:
		return "not allocated"
	case fleet.Open:
		return "unlimited sharing"
	}
	return "free"
}

// open returns a sentence about the devices with unlimited sharing, "" if there are none.
func (w *whoView) open() string {
	var names []string
	for i := range w.Devices {
		if w.Devices[i].State == fleet.Open {
			names = append(names, w.Devices[i].Label)
		}
	}
	for i := range w.Resources {
		if r := &w.Resources[i]; r.Open() && r.Allocatable > 0 {
			names = append(names, r.Name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return "Any number of pods may have " + and(names) + "."
}

// and joins names to a phrase.
func and(names []string) string {
	last := len(names) - 1
	if last == 0 {
		return names[0]
	}
	return strings.Join(names[:last], ", ") + " and " + names[last]
}

// freeText returns the number of free devices by kind, such as "4 gpu and 5 nic are free", "" if
// there are none. Devices with unlimited sharing are left out.
func (w *whoView) freeText() string {
	byKind := make(map[string]int64)
	var kinds []string
	add := func(kind string, n int64) {
		if n > 0 && byKind[kind] == 0 {
			kinds = append(kinds, kind)
		}
		byKind[kind] += n
	}
	for i := range w.Devices {
		if w.Devices[i].State == fleet.Free {
			_, free := w.Devices[i].CountAllocated()
			add(w.Devices[i].Kind, free)
		}
	}
	for i := range w.Resources {
		if !w.Resources[i].Open() {
			add(w.Resources[i].Name, w.Resources[i].Free())
		}
	}
	slices.SortStableFunc(kinds, func(a, b string) int { return cmp.Compare(kindRank(a), kindRank(b)) })
	parts := make([]string, len(kinds))
	for i, kind := range kinds {
		parts[i] = fmt.Sprintf("%d %s", byKind[kind], kind)
	}
	switch n := len(parts); {
	case n == 0:
		return ""
	case n == 1 && byKind[kinds[0]] == 1:
		return parts[0] + " is free."
	case n == 1:
		return parts[0] + " are free."
	default:
		return and(parts) + " are free."
	}
}
