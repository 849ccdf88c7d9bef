package terminal

import (
	"fmt"
	"strings"
	"time"
	"unicode"

	"golang.org/x/text/width"
)

// Columns returns the number of columns of the text in a terminal: two for each wide character of
// East Asian scripts (Unicode Standard Annex 11), and none for combining characters. The text must
// not contain colours.
func Columns(text string) (n int) {
	for _, r := range text {
		switch {
		case unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf):
		case isWide(r):
			n += 2
		default:
			n++
		}
	}
	return n
}

func isWide(r rune) bool {
	kind := width.LookupRune(r).Kind()
	return kind == width.EastAsianWide || kind == width.EastAsianFullwidth
}

// Cut shortens text to the given columns. An ellipsis replaces the rest.
func (s Style) Cut(text string, columns int) string {
	if Columns(text) <= columns {
		return text
	}
	end := "…"
	if s.ASCII {
		end = "~"
	}
	if columns < 1 {
		return ""
	}
	var kept strings.Builder
	left := columns - 1
	for _, r := range text {
		n := Columns(string(r))
		if n > left {
			break
		}
		left -= n
		kept.WriteRune(r)
	}
	return kept.String() + end
}

// PadText shortens the text or adds spaces, so that it has exactly the given columns.
func (s Style) PadText(text string, columns int) string {
	text = s.Cut(text, columns)
	return text + strings.Repeat(" ", columns-Columns(text))
}

// WrapText breaks text between words into lines of at most the given columns. A longer word gets a
// line of its own.
func WrapText(text string, columns int) (lines []string) {
	var line string
	for word := range strings.FieldsSeq(text) {
		switch {
		case line == "":
			line = word
		case Columns(line)+1+Columns(word) <= columns:
			line += " " + word
		default:
			lines = append(lines, line)
			line = word
		}
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}

// SafeText replaces control characters in untrusted text by question marks, since a terminal would
// interpret them.
func SafeText(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.In(r, unicode.Bidi_Control) {
			return '?'
		}
		return r
	}, text)
}

// FormatAge formats a duration roughly, in at most four characters: 42s, 18m, 7h, 17d, 3y.
func FormatAge(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d < 0:
		return "0s"
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < day:
		return fmt.Sprintf("%dh", d/time.Hour)
	case d < 3*365*day:
		return fmt.Sprintf("%dd", d/day)
	}
	return fmt.Sprintf("%dy", d/(365*day))
}
