package informant

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/internal/child"
	"chandler.dev/internal/hostservice"
)

// A command in the agent's pod, whose image has no program, gets the answer from the host service. If
// the service does not run the program, the command uses the one that is installed, or none.
func TestAskInformants(t *testing.T) {
	answer, err := facts.Format(nil)
	if err != nil {
		t.Fatal(err)
	}
	programs := map[string]func() (hostservice.Program, error){facts.Program: func() (hostservice.Program, error) {
		return child.Start("/bin/sh", "-c", `printf '%s\n' "$1"; read -r line`, "sh", string(bytes.TrimSpace(answer)))
	}}
	family := &discovery.Family{Name: "test", Programs: []*discovery.Program{{
		Name: "chandler-test", Library: "a library", File: "/run/answer", Driver: "/proc/self", Service: facts.Program, MaxSize: facts.MaxSize,
		Args:  func(string, string) []string { return nil },
		Check: func(text string) error { _, err := facts.Parse(text); return err },
		Lost:  facts.FormatError,
	}}}
	for name, test := range map[string]struct {
		programs  map[string]func() (hostservice.Program, error)
		installed bool
		want      []string
	}{
		"service":           {programs, false, []string{string(bytes.TrimSpace(answer))}},
		"nothing":           {nil, false, nil},
		"installed program": {nil, true, []string{string(bytes.TrimSpace(answer))}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			t.Setenv("PATH", dir)
			if test.installed {
				if err := os.WriteFile(filepath.Join(dir, "chandler-test"), slices.Concat([]byte("#!/bin/sh\necho '"), bytes.TrimSpace(answer), []byte("'\nread -r line\n")), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			hostFS, err := hostfs.Open("/")
			if err != nil {
				t.Fatal(err)
			}
			host := &discovery.Host{FS: hostFS}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			socket := filepath.Join(dir, "host")
			go func() {
				ended <- hostservice.Run(ctx, socket, hostservice.NewServer(hostservice.Config{Host: host, Programs: test.programs}))
			}()
			defer func() { cancel(); <-ended }()
			client := hostservice.NewClient(socket, nil)
			for {
				if _, err := client.DescribeService(t.Context()); err == nil {
					break
				}
			}
			host = &discovery.Host{FS: hostFS}
			askInformants(t.Context(), host, []*discovery.Family{family}, "/", client, io.Discard)
			text, _ := host.ReadText("/run/answer")
			var got []string
			if text != "" {
				got = []string{text}
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
