// Package terminal formats text for terminals: width, colours, and the glyphs of devices.
package terminal

import (
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// DefaultWidth is the width in characters of an output that is not a terminal.
const DefaultWidth = 80

// minWidth is the smallest width for the layout of text. A narrower terminal breaks the lines
// itself.
const minWidth = 40

// A Style determines the layout of text.
type Style struct {
	Width  int  // of a line, in characters
	Colour bool // whether colours are allowed
	ASCII  bool // whether only ASCII is allowed
}

// Plain is the style of a file.
var Plain = Style{Width: DefaultWidth}

// StyleOf returns the style for out. Only terminals have colours, unless the environment variable
// NO_COLOR is set (https://no-color.org) or TERM is "dumb". The style is ASCII if the argument or a
// locale without UTF-8 requires it. The environment is that of [os.LookupEnv].
func StyleOf(out io.Writer, environment func(string) (string, bool), ascii bool) Style {
	style := Style{Width: DefaultWidth, ASCII: ascii || !utf8Locale(environment)}
	if !IsTerminal(out) {
		return style
	}
	if width, _, err := term.GetSize(int(out.(*os.File).Fd())); err == nil && width > 0 {
		style.Width = max(width, minWidth)
	}
	name, _ := environment("TERM")
	no, _ := environment("NO_COLOR")
	style.Colour = no == "" && name != "dumb"
	return style
}

// IsTerminal reports whether out is a terminal.
func IsTerminal(out io.Writer) bool {
	file, ok := out.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

// utf8Locale reports whether the locale uses UTF-8. The first of the environment variables that is
// set and not empty determines the locale (POSIX, Environment Variables, 8.2). If none is set,
// UTF-8 is assumed: a container has no locale, but the terminal of its user has one.
func utf8Locale(environment func(string) (string, bool)) bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if locale, _ := environment(name); locale != "" {
			upper := strings.ToUpper(locale)
			return strings.Contains(upper, "UTF-8") || strings.Contains(upper, "UTF8")
		}
	}
	return true
}

// A Colour is one of the few colours with a meaning.
type Colour string

// Colours, as codes of Select Graphic Rendition (ECMA-48, 8.3.117).
const (
	Well    Colour = "32" // green
	Bad     Colour = "31" // red
	Warning Colour = "33" // yellow
	Moving  Colour = "34" // blue
	Unknown Colour = "90" // grey
	Strong  Colour = "1"  // bold
)

// PaintText returns the text in a colour. If the style has no colours, it returns the text
// unchanged.
func (s Style) PaintText(c Colour, text string) string {
	if !s.Colour || c == "" || text == "" {
		return text
	}
	return "\x1b[" + string(c) + "m" + text + "\x1b[0m"
}

// A Glyph represents the state of a device, or the result of a check.
type Glyph int

// Glyphs.
const (
	Free       Glyph = iota // not allocated
	Held                    // allocated
	Partly                  // partly allocated
	Moves                   // moves to the other API
	Degraded                // can be allocated, but has a problem
	Unhealthy               // cannot be used
	Unread                  // could not be read
	Open                    // unlimited sharing, without consumers
	OpenHeld                // unlimited sharing, with consumers
	Asis                    // healthy, consumers unknown
	OK                      // a check passed
	Failed                  // a check failed
	Warned                  // a check warns
	NotQueried              // a check did not apply
)

var glyphs = [...]struct {
	utf8, ascii string
	colour      Colour
}{
	Free:       {"□", ".", Well},
	Held:       {"■", "#", Well},
	Partly:     {"▪", "%", Well},
	Moves:      {"→", ">", Moving},
	Degraded:   {"!", "!", Warning},
	Unhealthy:  {"✗", "x", Bad},
	Unread:     {"?", "?", Unknown},
	Open:       {"○", "o", Well},
	OpenHeld:   {"●", "@", Well},
	Asis:       {"•", "*", Well},
	OK:         {"✓", "+", Well},
	Failed:     {"✗", "x", Bad},
	Warned:     {"!", "!", Warning},
	NotQueried: {"-", "-", Unknown},
}

// Glyph returns a glyph in its colour.
func (s Style) Glyph(g Glyph) string { return s.PaintText(glyphs[g].colour, s.BareGlyph(g)) }

// BareGlyph returns a glyph without colour, one character wide.
func (s Style) BareGlyph(g Glyph) string {
	if s.ASCII {
		return glyphs[g].ascii
	}
	return glyphs[g].utf8
}

// Colour returns the colour of a glyph.
func (g Glyph) Colour() Colour { return glyphs[g].colour }
