package main

import "chandler.dev/internal/command"

// version is set by the linker: -ldflags "-X main.version=v1.2.3".
var version = ""

// buildVersion returns the version of this program.
func buildVersion() string { return command.BuildVersion(version) }
