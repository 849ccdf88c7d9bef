// Package userspace defines the text format for the driver files that containers need, according to
// NVIDIA's own code for CDI specs. The command chandler-host writes the text, and the nvidia family
// reads it. The package does not use the NVIDIA code.
package userspace

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"
)

// Path is the path of the text in the host's file system. No such file exists on the host's disk:
// the agent overlays the program's output on the host's file system.
const Path = "/run/chandler/nvidia-userspace.json"

// MaxSize limits the text, in bytes. A family reads no more of any file. The text of a driver with
// all libraries takes half of the limit.
const MaxSize = 64 << 10

// version is the version of the format. Parse refuses other versions.
const version = 1

// ServiceProgram is the name of chandler-host --files in a host service.
const ServiceProgram = "driver-files"

// ScanInterval is the time between two scans of a driver root.
const ScanInterval = time.Minute

// HookProgram represents the program for NVIDIA hooks.
const HookProgram = "nvidia-cdi-hook"

// Answer is the answer of the NVIDIA code for one driver root.
type Answer struct {
	Driver string // the driver version in the names of its libraries: "570.124.06"

	// Edits are the mounts, hooks and environment variables of every container with a GPU. Paths of
	// files are host paths. The program of all hooks is [HookProgram].
	Edits specs.ContainerEdits
}

// document is the text as JSON.
type document struct {
	Version int                  `json:"version"`
	Driver  string               `json:"driver"`
	Edits   specs.ContainerEdits `json:"edits"`
}

// Format returns the text of an answer. It returns an error if Parse would refuse the text.
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

// Parse reads a text, completely or not at all: a container with half of a driver's libraries fails
// in ways that are hard to diagnose.
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
