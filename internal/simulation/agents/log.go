package agents

import (
	"fmt"
	"strings"
	"time"

	"github.com/go-logr/logr"

	"chandler.dev/internal/simulation/history"
)

// sink writes log messages to the history.
type sink struct {
	history *history.History
	prefix  string
	values  []any
	slices  bool // the sink of the library's controller of slices
}

// rescheduled is the message of the library's controller after it has scheduled the next sync of a
// pool. While the clock stands at the moment of the sync, as the clock of a simulation does, the
// controller would repeat this at once without end (resourceslice/resourceslicecontroller.go,
// syncPool).
const rescheduled = "Scheduled re-sync"

func (s *sink) Init(logr.RuntimeInfo) {}

func (s *sink) Enabled(level int) bool { return level <= 2 || s.slices }

func (s *sink) Info(level int, message string, values ...any) {
	if s.slices && message == rescheduled {
		time.Sleep(time.Microsecond)
	}
	if level > 2 {
		return
	}
	s.history.Log("%s%s%s", s.prefix, message, formatPairs(append(s.values, values...)))
}

func (s *sink) Error(err error, message string, values ...any) {
	s.history.Log("%s%s: %v%s", s.prefix, message, err, formatPairs(append(s.values, values...)))
}

func (s *sink) WithValues(values ...any) logr.LogSink {
	return &sink{s.history, s.prefix, append(append([]any{}, s.values...), values...), s.slices}
}

func (s *sink) WithName(name string) logr.LogSink {
	named := *s
	named.slices = s.slices || name == "ResourceSlice controller"
	return &named
}

func formatPairs(values []any) string {
	var b strings.Builder
	for i := 0; i+1 < len(values); i += 2 {
		fmt.Fprintf(&b, " %v=%v", values[i], values[i+1])
	}
	return b.String()
}
