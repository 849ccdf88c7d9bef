package kubectl

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"chandler.dev/cmd/kubectl-chandler/importer"
	"chandler.dev/cmd/kubectl-chandler/validation"
	"chandler.dev/internal/command"
)

// plugin runs a command of the plugin, and returns its output.
func plugin(args ...string) (string, error) {
	var out bytes.Buffer
	cmd := PluginCommand("v1.2.3")
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	err := cmd.Execute()
	return out.String(), err
}

func TestImport(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	same := file("same.yaml", "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n")
	changed := file("changed.yaml", "version: v1\nflags: {plugin: {deviceIDStrategy: serial}}\n")
	unknown := file("unknown.yaml", "hello: world\n")
	tests := map[string]struct {
		args   []string
		code   int
		prints string
		says   string
	}{
		"the same":             {[]string{same}, 0, "replicas: 2", ""},
		"something else":       {[]string{changed, same}, 2, "deviceIDStrategy: serial", "by 1 setting that could not be carried over"},
		"unknown":              {[]string{same, unknown}, 1, "", "unknown.yaml: it contains no supported configuration; the supported formats are\n  HAMi"},
		"missing":              {[]string{filepath.Join(dir, "missing.yaml")}, 1, "", "missing.yaml"},
		"no file":              {nil, 2, "", "usage: kubectl chandler import FILE..."},
		"only what is said":    {[]string{"--only", same}, 0, "exclude:", ""},
		"named, without names": {[]string{"--named", "other", same}, 1, "", `no configuration is called "other"`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			out, err := plugin(append([]string{"import"}, test.args...)...)
			code := 0
			if err != nil {
				code = command.ExitCode(err)
			}
			if code != test.code || !strings.Contains(out, test.prints) || (test.prints == "") != (out == "") {
				t.Errorf("exit code %d, %v; printed\n%s", code, err, out)
			}
			if test.says != "" && !strings.Contains(err.Error(), test.says) {
				t.Errorf("says %v", err)
			}
		})
	}
}

// The output contains objects that the other commands accept.
func TestImportFromStandardInput(t *testing.T) {
	for name, changed := range map[string]bool{"nvidia-mps.yaml": false, "dra-nvidia.yaml": true, "dra-others.yaml": true} {
		stdin, err := os.Open(filepath.Join("..", "importer", "testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		defer stdin.Close()
		var out strings.Builder
		err = importFiles(stdin, &out, []string{"-"}, importer.Options{})
		if _, ok := errors.AsType[errChanged](err); ok != changed || err != nil && !ok {
			t.Fatalf("%s: %v", name, err)
		}
		var printed strings.Builder
		if err := validation.Files(strings.NewReader(out.String()), &printed, []string{"-"}); err != nil {
			t.Errorf("%s: %v\n%s", name, err, printed.String())
		}
		for line := range strings.Lines(printed.String()) {
			if strings.Contains(line, ": warning: ") && !strings.Contains(line, "nvidia.com is the class of a driver") {
				t.Errorf("%s: %s", name, line)
			}
		}
	}
}

// A plugin's configuration and the claims of a DRA driver are written as one file.
func TestImportConfigAndClaims(t *testing.T) {
	testdata := filepath.Join("..", "importer", "testdata")
	out, err := plugin("import", filepath.Join(testdata, "nvidia-mps.yaml"), filepath.Join(testdata, "dra-nvidia.yaml"))
	if _, ok := errors.AsType[errChanged](err); !ok {
		t.Fatal(err)
	}
	for _, want := range []string{"kind: DriverConfig", "kind: ResourceClaimTemplate", "extendedResourceName: example.com/h100"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
}

func TestImportHelp(t *testing.T) {
	help, err := plugin("import", "--help")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{importer.Formats(), "exit code", "--named", "--only", "standard input"} {
		if !strings.Contains(help, want) {
			t.Errorf("no %q in:\n%s", want, help)
		}
	}
}
