package labels

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"chandler.dev/discovery"
)

// MaxFile is how long a feature file may be, in bytes. Node Feature Discovery takes no
// label of a longer one (Input format in its customization guide).
const MaxFile = 64 << 10

// header says whose the file is. Node Feature Discovery reads a comment that begins with
// "# +" as a directive.
const header = "# Chandler writes this file for Node Feature Discovery.\n"

// File returns the feature file that says labels, in the order of their names. The error is
// that Node Feature Discovery would not take one of them, or not the file.
func File(labels map[string]string) ([]byte, error) {
	text := header + Lines(labels)
	var errs []error
	for name, value := range labels {
		errs = append(errs, discovery.CheckLabel(name, value))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("feature file: %w", err)
	}
	if len(text) > MaxFile {
		return nil, fmt.Errorf("feature file: %d bytes of %d labels, at most %d", len(text), len(labels), MaxFile)
	}
	return []byte(text), nil
}

// Lines returns lines such as "amd.com/gpu.vram=64G", in the order of the names.
func Lines(labels map[string]string) string {
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		fmt.Fprintf(&text, "%s=%s\n", name, labels[name])
	}
	return text.String()
}
