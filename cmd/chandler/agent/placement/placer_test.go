package placement

import (
	"testing"
	"time"
)

// A wait has a start time only if this agent observed the start. Before, another agent may have.
func TestBeginnings(t *testing.T) {
	at := time.Date(2026, 11, 20, 6, 41, 11, 0, time.UTC)
	now := map[string]string{"a": "moves", "b": "moves"}
	if begun := waitBeginnings(nil, now, nil, at); len(begun) != 0 {
		t.Errorf("at the start: %v", begun)
	}
	begun := waitBeginnings(map[string]string{"a": "moves"}, now, nil, at)
	if len(begun) != 1 || !begun["b"].Equal(at) {
		t.Errorf("a waited before: %v", begun)
	}
	begun = waitBeginnings(now, now, begun, at.Add(time.Hour))
	if len(begun) != 1 || !begun["b"].Equal(at) {
		t.Errorf("an hour later: %v", begun)
	}
	if begun = waitBeginnings(now, map[string]string{}, begun, at); len(begun) != 0 {
		t.Errorf("nothing waits: %v", begun)
	}
}
