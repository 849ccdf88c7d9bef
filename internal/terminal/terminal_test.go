package terminal

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

func environment(pairs ...string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		for _, pair := range pairs {
			if n, value, _ := strings.Cut(pair, "="); n == name {
				return value, true
			}
		}
		return "", false
	}
}

func TestStyleOfAFile(t *testing.T) {
	style := StyleOf(new(bytes.Buffer), environment("LANG=de_DE.UTF-8", "TERM=xterm"), false)
	if style != Plain {
		t.Errorf("style of a file: %+v, want %+v", style, Plain)
	}
	if got := style.Glyph(Unhealthy); got != "✗" {
		t.Errorf("glyph in a file: %q", got)
	}
	if got := (Style{Colour: true}).Glyph(Unhealthy); got != "\x1b[31m✗\x1b[0m" {
		t.Errorf("glyph in colour: %q", got)
	}
}

func TestLocale(t *testing.T) {
	for _, test := range []struct {
		env   []string
		ascii bool
	}{
		{nil, false},
		{[]string{"LANG=C"}, true},
		{[]string{"LANG=en_US.utf8"}, false},
		{[]string{"LC_ALL=POSIX", "LANG=en_US.UTF-8"}, true},
		{[]string{"LC_ALL=", "LC_CTYPE=C.UTF-8", "LANG=C"}, false},
	} {
		if got := StyleOf(new(bytes.Buffer), environment(test.env...), false).ASCII; got != test.ascii {
			t.Errorf("%v: ASCII %t, want %t", test.env, got, test.ascii)
		}
	}
}

func TestCut(t *testing.T) {
	for _, test := range []struct {
		text    string
		columns int
		want    string
	}{
		{"abcdef", 6, "abcdef"},
		{"abcdef", 5, "abcd…"},
		{"日本語", 6, "日本語"},
		{"日本語", 5, "日本…"},
		{"日本語", 4, "日…"},
		{"abc", 1, "…"},
		{"abc", 0, ""},
	} {
		if got := Plain.Cut(test.text, test.columns); got != test.want {
			t.Errorf("Cut(%q, %d) = %q, want %q", test.text, test.columns, got, test.want)
		}
		if got := Columns(Plain.PadText(test.text, test.columns)); got != test.columns {
			t.Errorf("Pad(%q, %d) takes %d columns", test.text, test.columns, got)
		}
	}
	if got := (Style{ASCII: true}).Cut("abcdef", 5); got != "abcd~" {
		t.Errorf("cut in ASCII: %q", got)
	}
}

func TestWrap(t *testing.T) {
	got := WrapText("a pod holds it, and  a-very-long-word-indeed\nends", 12)
	want := []string{"a pod holds", "it, and", "a-very-long-word-indeed", "ends"}
	if strings.Join(got, "|") != strings.Join(want, "|") {
		t.Errorf("Wrap: %q, want %q", got, want)
	}
}

func TestSafe(t *testing.T) {
	if got := SafeText("H100\x1b[31m\u202e\n"); got != "H100?[31m??" {
		t.Errorf("Safe: %q", got)
	}
}

func TestAge(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second:             "0s",
		42 * time.Second:         "42s",
		119 * time.Minute:        "1h",
		47 * time.Hour:           "1d",
		2 * 365 * 24 * time.Hour: "730d",
		4 * 365 * 24 * time.Hour: "4y",
	} {
		if got := FormatAge(d); got != want {
			t.Errorf("Age(%s) = %s, want %s", d, got, want)
		}
	}
}
