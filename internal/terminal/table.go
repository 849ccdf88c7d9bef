package terminal

import (
	"fmt"
	"io"
	"strings"
)

// Unlimited is the width of text that is not for a terminal.
const Unlimited = 0

// Table is text in columns, two spaces apart.
type Table struct {
	Columns []Column
	Rows    [][]Cell
}

// Column is a column of a table.
type Column struct {
	Title    string
	Right    bool // aligned to the right
	Least    int  // the minimum width in columns of the terminal, 0 if the text must not be cut
	Overflow bool // in the last column: the text is complete, and only its first word needs room
}

// Cell is a text in a table, with its coloured form if it has one.
type Cell struct{ Text, Painted string }

// TextCell returns the cell of a text without colours.
func TextCell(text string) Cell { return Cell{Text: SafeText(text)} }

// NumberCell returns the cell of a number.
func NumberCell[N int | int64](n N) Cell { return TextCell(fmt.Sprint(n)) }

// AddRow adds a row with a cell for each column.
func (t *Table) AddRow(cells ...Cell) { t.Rows = append(t.Rows, cells) }

// ColumnWidths returns the width of each column, so that the table fits if the columns can be cut
// that far. The widest column is cut first.
func (t *Table) ColumnWidths(width int) []int {
	out := make([]int, len(t.Columns))
	beyond := 0 // columns of the terminal that the table need not have
	for i, c := range t.Columns {
		out[i] = Columns(c.Title)
		first := out[i]
		for _, row := range t.Rows {
			out[i] = max(out[i], Columns(row[i].Text))
			word, _, _ := strings.Cut(row[i].Text, " ")
			first = max(first, Columns(word))
		}
		if c.Overflow {
			beyond = out[i] - first
		}
	}
	for {
		sum, widest := 2*(len(out)-1)-beyond, -1
		for i, w := range out {
			sum += w
			if t.Columns[i].Least > 0 && w > t.Columns[i].Least && (widest < 0 || w > out[widest]) {
				widest = i
			}
		}
		if width == Unlimited || sum <= width || widest < 0 {
			return out
		}
		out[widest]--
	}
}

// Print prints the titles and the rows. No line is wider than the style's width, except where columns
// cannot be cut.
func (t *Table) Print(out io.Writer, style Style) error {
	widths := t.ColumnWidths(style.Width)
	titles := make([]Cell, len(t.Columns))
	for i, c := range t.Columns {
		titles[i] = TextCell(c.Title)
	}
	var b strings.Builder
	t.writeLine(&b, style, widths, titles)
	for _, row := range t.Rows {
		t.writeLine(&b, style, widths, row)
	}
	_, err := io.WriteString(out, b.String())
	return err
}

func (t *Table) writeLine(b *strings.Builder, style Style, widths []int, cells []Cell) {
	var line strings.Builder
	for i, c := range cells {
		if i > 0 {
			line.WriteString("  ")
		}
		text := style.Cut(c.Text, widths[i])
		pad := strings.Repeat(" ", widths[i]-Columns(text))
		if c.Painted != "" && text == c.Text {
			text = c.Painted
		}
		if t.Columns[i].Right {
			text, pad = pad+text, ""
		}
		line.WriteString(text + pad)
	}
	b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
}
