// Package terminal is for text that people read in a terminal: its width, its
// colours, and the glyphs that stand for devices.
package terminal

import (
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// DefaultWidth is the width in characters of what is no terminal.
const DefaultWidth = 80

// minWidth is the least width that text is laid out for. A narrower terminal
// breaks the lines itself.
const minWidth = 40

// A Style says how text for people is written.
type Style struct {
	Width  int  // of a line, in characters
	Colour bool // whether colours may be used
	ASCII  bool // whether nothing but ASCII may be used
}

// Plain is the style of a file.
var Plain = Style{Width: DefaultWidth}

// Of returns the style for out. Colours are for terminals only, and for none where the
// variable NO_COLOR is set (https://no-color.org) or TERM is "dumb". ASCII is asked
// for, or follows from a locale that is not UTF-8. The environment is that of
// [os.LookupEnv].
func Of(out io.Writer, environment func(string) (string, bool), ascii bool) Style {
	style := Style{Width: DefaultWidth, ASCII: ascii || !utf8Locale(environment)}
	file, ok := out.(*os.File)
	if !ok || !term.IsTerminal(int(file.Fd())) {
		return style
	}
	if width, _, err := term.GetSize(int(file.Fd())); err == nil && width > 0 {
		style.Width = max(width, minWidth)
	}
	name, _ := environment("TERM")
	no, _ := environment("NO_COLOR")
	style.Colour = no == "" && name != "dumb"
	return style
}

// utf8Locale is whether the locale's characters are UTF-8. The first of the variables that is
// set and not empty says it (POSIX, Environment Variables, 8.2). Where none is set it is
// assumed: a container has no locale, and its terminal is somebody's who has.
func utf8Locale(environment func(string) (string, bool)) bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if locale, _ := environment(name); locale != "" {
			upper := strings.ToUpper(locale)
			return strings.Contains(upper, "UTF-8") || strings.Contains(upper, "UTF8")
		}
	}
	return true
}

// A Colour is one of the few that mean something.
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

// Paint returns the text in a colour, or as it is where there are none.
func (s Style) Paint(c Colour, text string) string {
	if !s.Colour || c == "" || text == "" {
		return text
	}
	return "\x1b[" + string(c) + "m" + text + "\x1b[0m"
}

// A Glyph stands for the state of a device, or for the result of a check.
type Glyph int

// Glyphs.
const (
	Free      Glyph = iota // nobody has it
	Held                   // somebody has it
	Partly                 // somebody has a part of it
	Moves                  // it moves to the other API
	Degraded               // it is given out, though something is wrong
	Unhealthy              // it cannot be used
	Unread                 // it could not be read
	Open                   // any number of pods may have it, and none has
	OpenHeld               // any number of pods may have it, and some have
	Asis                   // nobody was asked who has it, and it is well
	OK                     // a check passed
	Failed                 // a check failed
	Warned                 // a check warns
	NotAsked               // a check did not apply
)

var glyphs = [...]struct {
	utf8, ascii string
	colour      Colour
}{
	Free:      {"□", ".", Well},
	Held:      {"■", "#", Well},
	Partly:    {"▪", "%", Well},
	Moves:     {"→", ">", Moving},
	Degraded:  {"!", "!", Warning},
	Unhealthy: {"✗", "x", Bad},
	Unread:    {"?", "?", Unknown},
	Open:      {"○", "o", Well},
	OpenHeld:  {"●", "@", Well},
	Asis:      {"•", "*", Well},
	OK:        {"✓", "+", Well},
	Failed:    {"✗", "x", Bad},
	Warned:    {"!", "!", Warning},
	NotAsked:  {"-", "-", Unknown},
}

// Glyph returns a glyph in its colour.
func (s Style) Glyph(g Glyph) string { return s.Paint(glyphs[g].colour, s.Bare(g)) }

// Bare returns a glyph without colour, one character wide.
func (s Style) Bare(g Glyph) string {
	if s.ASCII {
		return glyphs[g].ascii
	}
	return glyphs[g].utf8
}

// Colour of a glyph.
func (g Glyph) Colour() Colour { return glyphs[g].colour }
