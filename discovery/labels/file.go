package labels

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"chandler.dev/discovery"
)

// MaxFile is the maximum size of a feature file in bytes. Node Feature Discovery ignores longer
// files (Input format in its customization guide).
const MaxFile = 64 << 10

// header identifies the writer of the file. Node Feature Discovery reads a comment that begins with
// "# +" as a directive.
const header = "# Chandler writes this file for Node Feature Discovery.\n"

// File returns the feature file with the labels, in name order. It returns an error if Node Feature
// Discovery would refuse a label or the file.
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

// Lines returns lines such as "amd.com/gpu.vram=64G", in name order.
func Lines(labels map[string]string) string {
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		fmt.Fprintf(&text, "%s=%s\n", name, labels[name])
	}
	return text.String()
}
