package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"chandler.dev/cmd/chandler/importer"
)

func TestConfigImport(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		write(t, path, text)
		return path
	}
	same := file("same.yaml", "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n")
	changed := file("changed.yaml", "version: v1\nflags: {plugin: {deviceIDStrategy: index}}\n")
	unknown := file("unknown.yaml", "hello: world\n")
	tests := map[string]struct {
		args   []string
		code   int
		prints string
		says   string
	}{
		"the same":               {[]string{same}, 0, "replicas: 2", ""},
		"something else":         {[]string{changed, same}, 2, "deviceIDStrategy: index", "1 setting not carried over"},
		"unknown":                {[]string{same, unknown}, 1, "", "unknown.yaml: nothing in it is known; known are\n  NVIDIA's"},
		"missing":                {[]string{filepath.Join(dir, "missing.yaml")}, 1, "", "missing.yaml"},
		"no file":                {nil, 1, "", "arg"},
		"only what is said":      {[]string{"--only", same}, 0, "exclude:", ""},
		"named, where it is one": {[]string{"--named", "other", same}, 0, "replicas: 2", ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			out, _, err := chandler(append([]string{"config", "import"}, test.args...)...)
			code := 0
			if err != nil {
				code = exitCode(err)
			}
			if code != test.code || !strings.Contains(out, test.prints) || (test.prints == "") != (out == "") {
				t.Errorf("exit code %d, %v; printed\n%s", code, err, out)
			}
			if test.says != "" && !strings.Contains(err.Error(), test.says) {
				t.Errorf("says %v", err)
			}
		})
	}
	if exitCode(errors.Join(errors.New("read"), os.ErrNotExist)) != 1 {
		t.Error("an error without a code of its own has another than 1")
	}
}

// What is written is a configuration that the other commands take.
func TestConfigImportFromStandardInput(t *testing.T) {
	stdin, err := os.Open(filepath.Join("importer", "testdata", "nvidia-mps.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	var out strings.Builder
	if err := importFiles(stdin, &out, []string{"-"}, importer.Options{}); err != nil {
		t.Fatal(err)
	}
	if printed, err := validate(out.String()); err != nil {
		t.Errorf("%v\n%s", err, printed)
	}
}

func TestConfigImportHelp(t *testing.T) {
	help := mustRun(t, "config", "import", "--help")
	for _, want := range []string{importer.Formats(), "exit code", "--named", "--only", "standard input"} {
		if !strings.Contains(help, want) {
			t.Errorf("no %q in:\n%s", want, help)
		}
	}
	if out := mustRun(t, "config"); !strings.Contains(out, "import") {
		t.Errorf("chandler config prints:\n%s", out)
	}
}
