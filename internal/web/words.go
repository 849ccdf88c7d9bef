package web

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// trimZero formats a number with at most one decimal.
func trimZero(n float64) string {
	return strings.TrimSuffix(strconv.FormatFloat(n, 'f', 1, 64), ".0")
}

// short formats a duration in a single unit.
func short(d time.Duration) string {
	switch {
	case d < time.Minute:
		return "< 1 min"
	case d < time.Hour:
		return fmt.Sprintf("%d min", d/time.Minute)
	case d < 24*time.Hour:
		return fmt.Sprintf("%d h", d/time.Hour)
	}
	return fmt.Sprintf("%d d", d/(24*time.Hour))
}

// formatLong formats a duration like short, with minutes for the first hours.
func formatLong(d time.Duration) string {
	minutes := d % time.Hour / time.Minute
	if d < time.Hour || d >= 10*time.Hour || minutes == 0 {
		return short(d)
	}
	return fmt.Sprintf("%s %d min", short(d), minutes)
}

// stamp is a moment, and how long ago it was.
type stamp struct {
	Machine string // for machines
	Exact   string // for people
	Short   string
	Long    string
}

// stampOf returns the stamp of a moment since, as seen at the time at. It returns nil for an
// unknown moment.
func stampOf(since, at time.Time) *stamp {
	if since.IsZero() {
		return nil
	}
	ago := max(0, at.Sub(since))
	return &stamp{
		Machine: since.UTC().Format(time.RFC3339),
		Exact:   since.UTC().Format("2006-01-02 15:04:05") + " UTC",
		Short:   short(ago),
		Long:    formatLong(ago),
	}
}

// asSentence returns the text with a capital at the beginning and a full stop at the end. Each line
// becomes a sentence.
func asSentence(text string) string {
	first, rest, several := strings.Cut(strings.TrimSpace(text), "\n")
	if several {
		return asSentence(first) + " " + asSentence(rest)
	}
	return oneSentence(first)
}

func oneSentence(text string) string {
	text = strings.TrimSpace(text)
	first, n := utf8.DecodeRuneInString(text)
	if n == 0 {
		return ""
	}
	text = string(unicode.ToUpper(first)) + text[n:]
	if !strings.HasSuffix(text, ".") {
		text += "."
	}
	return text
}

// sentenceCase returns the text with a capital at the beginning.
func sentenceCase(text string) string { return strings.TrimSuffix(asSentence(text), ".") }
