package kubectl

import (
	"fmt"
	"io"
	"strings"

	"chandler.dev/internal/terminal"
)

// cell is a text in a table, with its coloured form if it has one.
type cell struct{ text, painted string }

func plainCell(text string) cell { return cell{text: terminal.SafeText(text)} }

func numberCell[N int | int64](n N) cell { return plainCell(fmt.Sprint(n)) }

// column is a column of a table.
type column struct {
	title string
	right bool
	least int // the minimum width in terminal columns, 0 if the text must not be cut
}

// table is text in columns, two spaces apart.
type table struct {
	columns []column
	rows    [][]cell
}

func (t *table) add(cells ...cell) { t.rows = append(t.rows, cells) }

// columnWidths returns the width of each column, so that the table fits if the columns can be cut
// that far. The widest column is cut first.
func (t *table) columnWidths(width int) []int {
	out := make([]int, len(t.columns))
	for i, c := range t.columns {
		out[i] = terminal.Columns(c.title)
		for _, row := range t.rows {
			out[i] = max(out[i], terminal.Columns(row[i].text))
		}
	}
	for {
		sum, widest := 2*(len(out)-1), -1
		for i, w := range out {
			sum += w
			if t.columns[i].least > 0 && w > t.columns[i].least && (widest < 0 || w > out[widest]) {
				widest = i
			}
		}
		if sum <= width || widest < 0 {
			return out
		}
		out[widest]--
	}
}

// write writes the table. No line is wider than the style's width.
func (t *table) write(out io.Writer, style terminal.Style) {
	widths := t.columnWidths(style.Width)
	line := func(cells []cell) {
		var b strings.Builder
		for i, c := range cells {
			if i > 0 {
				b.WriteString("  ")
			}
			text := style.Cut(c.text, widths[i])
			pad := strings.Repeat(" ", max(0, widths[i]-terminal.Columns(text)))
			if c.painted != "" && text == c.text {
				text = c.painted
			}
			if t.columns[i].right {
				text, pad = pad+text, ""
			}
			b.WriteString(text + pad)
		}
		fmt.Fprintln(out, strings.TrimRight(b.String(), " "))
	}
	titles := make([]cell, len(t.columns))
	for i, c := range t.columns {
		titles[i] = plainCell(c.title)
	}
	line(titles)
	for _, row := range t.rows {
		line(row)
	}
}
