// Package userspace is what NVIDIA's own code for CDI specs says that containers need of a
// driver's files, as the text of a file of the host. Command chandler-nvml writes it, and the
// nvidia family reads it. This package knows none of NVIDIA's code.
package userspace

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	"tags.cncf.io/container-device-interface/specs-go"
)

// Path is where the family finds the file. No such file lies on a host's disk: the agent lays
// what the program says over the host's file system.
const Path = "/run/chandler/nvidia-userspace.json"

// MaxSize is how long the text may be, in bytes: as much as a family reads of any file. That of
// a driver with all its libraries takes half of it.
const MaxSize = 64 << 10

// version is that of the format. A text of another one is not read.
const version = 1

// HookProgram stands in the text for the program that runs NVIDIA's hooks.
const HookProgram = "nvidia-cdi-hook"

// Answer is what NVIDIA's code says of one driver root.
type Answer struct {
	Driver string // the version of the driver, as its libraries have it in their names: "570.124.06"

	// Edits are what every container needs that has a GPU: mounts, hooks and variables. Paths
	// of files are those on the host. Hooks name NVIDIA's program, [HookProgram].
	Edits specs.ContainerEdits
}

// document is the text.
type document struct {
	Version int                  `json:"version"`
	Driver  string               `json:"driver"`
	Edits   specs.ContainerEdits `json:"edits"`
}

// Format returns the text of an answer. An answer that Parse would refuse is an error.
func Format(answer Answer) ([]byte, error) {
	text, err := json.Marshal(document{Version: version, Driver: answer.Driver, Edits: answer.Edits})
	if err != nil {
		return nil, fmt.Errorf("format the user space: %w", err)
	}
	if _, err := Parse(string(text)); err != nil {
		return nil, err
	}
	return text, nil
}

// Parse reads a text. It is taken as a whole or not at all: a container with half of a driver's
// libraries fails in ways that are hard to find.
func Parse(text string) (Answer, error) {
	var read document
	if len(text) > MaxSize {
		return Answer{}, fmt.Errorf("user space: %d bytes, at most %d", len(text), MaxSize)
	}
	decoder := json.NewDecoder(bytes.NewReader([]byte(text)))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&read); err != nil {
		return Answer{}, fmt.Errorf("user space: %w", err)
	}
	if _, err := decoder.Token(); err != io.EOF {
		return Answer{}, fmt.Errorf("user space: more than one value")
	}
	if read.Version != version {
		return Answer{}, fmt.Errorf("user space: version %d, want %d", read.Version, version)
	}
	answer := Answer{Driver: read.Driver, Edits: read.Edits}
	if err := answer.check(); err != nil {
		return Answer{}, fmt.Errorf("user space: %w", err)
	}
	return answer, nil
}
