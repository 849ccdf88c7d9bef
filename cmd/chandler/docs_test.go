package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"

	"chandler.dev/cmd/kubectl-chandler/kubectl"
	"chandler.dev/internal/command"
	"chandler.dev/internal/docs"
)

const projectRoot = "../.."

// userPages returns the user documentation, and CONTRIBUTING.md.
func userPages(t *testing.T) []docs.Page {
	t.Helper()
	pages, err := docs.All(projectRoot)
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(pages, func(p docs.Page) bool { return p.Path == "ARCHITECTURE.md" || p.Path == "CHANGELOG.md" })
}

// programs lists unchecked commands, with the reason.
var programs = map[string]string{
	"kind":          "a cluster in Docker, of another project",
	"ssh":           "runs a command on a node",
	"scp":           "copies a file to a node",
	"skopeo":        "needs a registry",
	"fuser":         "lists processes of the node",
	"./gpu.test":    "is built by the commands of an earlier block",
	"docker":        "needs Docker and a registry",
	"export":        "changes the shell that you type it in",
	"install":       "copies a binary to where you want it",
	"ln":            "makes a link where you want it",
	"chcon":         "changes labels of SELinux, which this machine may lack",
	"modprobe":      "loads a module of the host",
	"source":        "changes the shell that you type it in",
	"systemctl":     "changes the host",
	"curl":          "asks an agent of a cluster",
	"tar":           "unpacks what a command wrote",
	"git":           "needs a checkout of your own",
	"nvidia-smi":    "comes from the NVIDIA driver",
	"chandler-host": "changes the host",
	"jq":            "is not part of this",
	"grep":          "is not part of this",
	"echo":          "is not part of this",
	"containerd":    "is the runtime of the node",
	"cosign":        "needs a registry",
	"crio":          "is the runtime of the node",
	"gcloud":        "creates a cluster of GKE",
	"oc":            "needs an OpenShift cluster",
	"sha256sum":     "checks what was released",
	"talosctl":      "changes a host with Talos",
}

// Every command in the documentation is valid: make targets, files and charts exist, and Chandler's
// commands accept their arguments. Commands that only read files are run with the files of
// fixtures.
func TestDocsCommands(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(projectRoot, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range userPages(t) {
		t.Run(page.Path, func(t *testing.T) {
			for _, block := range page.Blocks() {
				commands, err := block.Commands()
				if err != nil {
					t.Errorf("%s: %v", page.Path, err)
				}
				dir := projectRoot
				for _, c := range commands {
					if err := checkCommand(t, c, &dir, string(makefile)); err != nil {
						t.Errorf("%s:%d: %s: %v", page.Path, c.Line, strings.Join(c.Words, " "), err)
					}
				}
			}
		})
	}
}

func checkCommand(t *testing.T, c docs.Command, dir *string, makefile string) error {
	words := c.Words
	if i := slices.Index(words, "./chandler"); words[0] == "ssh" && i > 0 {
		_, err := findCommand(newCommand(), words[i+1:])
		return err
	}
	if words[0] == "sudo" {
		words = words[1:]
	}
	switch program := words[0]; filepath.Base(program) {
	case "chandler":
		return runChandler(t, newCommand(), words[1:])
	case "kubectl-chandler":
		return runChandler(t, newPlugin(), words[1:])
	case "kubectl":
		if len(words) > 1 && words[1] == "chandler" {
			return runChandler(t, newPlugin(), words[2:])
		}
		if i := slices.Index(words, "--"); i >= 0 && filepath.Base(words[i+1]) == "chandler" {
			_, err := findCommand(newCommand(), words[i+2:])
			return err
		}
		return checkFiles(words, "-f", "--filename", "--patch-file")
	case "helm":
		return checkChart(words)
	case "make":
		return checkTargets(words[1:], makefile)
	case "cd":
		*dir = filepath.Join(*dir, words[1])
		_, err := os.Stat(*dir)
		return err
	case "go":
		return checkPackages(*dir, words[1:])
	default:
		if programs[program] == "" && !slices.Contains(hostPrograms, program) {
			return fmt.Errorf("is neither checked nor listed with a reason in programs")
		}
		return nil
	}
}

// checkFiles checks that the files after the given flags exist in the project. A name without a
// directory is a file that the reader creates.
func checkFiles(words []string, flags ...string) error {
	for i, word := range words[:len(words)-1] {
		if !slices.Contains(flags, word) || !strings.Contains(words[i+1], "/") {
			continue
		}
		if _, err := os.Stat(filepath.Join(projectRoot, words[i+1])); err != nil {
			return err
		}
	}
	return nil
}

// checkChart checks that the project has a chart with the given values.
func checkChart(words []string) error {
	var values map[string]any
	for i, word := range words {
		if i > 0 && words[i-1] == "--values" {
			if err := checkFiles(words, "--values"); err != nil {
				return err
			}
			continue
		}
		if strings.HasPrefix(word, "deployments/") {
			data, err := os.ReadFile(filepath.Join(projectRoot, word, "values.yaml"))
			if err != nil {
				return err
			}
			if err := yaml.Unmarshal(data, &values); err != nil {
				return err
			}
		}
		if values == nil || i == 0 || words[i-1] != "--set" && words[i-1] != "--set-string" {
			continue
		}
		key, _, _ := strings.Cut(word, "=")
		path := strings.Split(key, ".")
		at := values
		for _, name := range path[:len(path)-1] {
			inner, ok := at[name].(map[string]any)
			if !ok {
				return fmt.Errorf("the chart has no value %s", key)
			}
			at = inner
		}
		anyKey := len(at) == 0 || path[0] == "config" // such as nodeSelector, which is empty by default
		if _, ok := at[path[len(path)-1]]; !ok && !anyKey {
			return fmt.Errorf("the chart has no value %s", key)
		}
	}
	return nil
}

// checkTargets checks the Makefile for the targets.
func checkTargets(words []string, makefile string) error {
	for _, target := range words {
		if strings.Contains(target, "=") {
			continue
		}
		if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(target) + `:`).MatchString(makefile) {
			return fmt.Errorf("the Makefile has no target %s", target)
		}
	}
	return nil
}

// checkPackages checks that packages of the project exist, except those of the example family.
func checkPackages(dir string, words []string) error {
	for _, word := range words {
		if !strings.HasPrefix(word, "./") || strings.Contains(word, "mydevice") {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, strings.TrimSuffix(word, "/..."))); err != nil {
			return err
		}
	}
	return nil
}

// newPlugin returns the command "kubectl chandler".
func newPlugin() *cobra.Command { return kubectl.PluginCommand("v1") }

// findCommand returns the command of a program for a list of arguments, with its flags set.
func findCommand(program *cobra.Command, args []string) (*cobra.Command, error) {
	program.InitDefaultCompletionCmd(args...)
	c, rest, err := program.Find(args)
	if err != nil {
		return nil, err
	}
	if c.DisableFlagParsing {
		return nil, c.RunE(c, rest) // the command has moved to the other program
	}
	c.InitDefaultHelpFlag()
	if err := c.ParseFlags(rest); err != nil {
		return nil, err
	}
	return c, c.ValidateArgs(c.Flags().Args())
}

// fixtures maps file names in the documentation to files of the project.
var fixtures = map[string]string{
	"my-config.yaml":         "deployments/examples/config-gpu-memory.yaml",
	"my-claims.yaml":         "deployments/examples/gpu-pair.yaml",
	"config.yaml":            "cmd/chandler/testdata/config.yaml",
	"provision.yaml":         "deployments/examples/provision.yaml",
	"rack7.host":             "discovery/families/amdgpu/testdata/mi210x8.host",
	"time-slicing.yaml":      "cmd/kubectl-chandler/importer/testdata/nvidia-mps.yaml",
	"sriovdp-daemonset.yaml": "cmd/kubectl-chandler/importer/testdata/sriovdp-alone.yaml",
	"sriovdp-config.yaml":    "cmd/kubectl-chandler/importer/testdata/sriovdp.json",
	"classes.yaml":           "cmd/kubectl-chandler/importer/testdata/dra-nvidia.yaml",
	"claims.yaml":            "cmd/kubectl-chandler/importer/testdata/dra-others.yaml",
}

// inputs maps commands to replacement files for standard input.
var inputs = map[string]string{
	"kubectl chandler validate": "deployments/deviceclasses.yaml",
	"kubectl chandler import":   "cmd/kubectl-chandler/importer/testdata/nvidia-daemonset.yaml",
}

// readers lists the commands that only read files. The test runs them.
var readers = []string{"chandler discover", "chandler slices", "chandler version", "chandler migrate plan", "kubectl chandler validate", "kubectl chandler import", "kubectl chandler version"}

// runChandler runs a command of a program if it only reads files. The command must succeed or exit
// with code 2, which "kubectl chandler import" uses for incomplete imports.
func runChandler(t *testing.T, program *cobra.Command, args []string) error {
	c, err := findCommand(program, args)
	if err != nil {
		return err
	}
	if !slices.Contains(readers, c.CommandPath()) || len(c.Flags().Args()) == 0 && c.Name() != "discover" && c.Name() != "version" {
		return nil
	}
	_, err = outputOf(t, program, c.CommandPath(), args)
	if err != nil && command.ExitCode(err) == 2 {
		return nil
	}
	return err
}

// outputOf runs a command in a directory with the fixtures and the files of the project.
func outputOf(t *testing.T, cmd *cobra.Command, path string, args []string) (string, error) {
	t.Helper()
	root, err := filepath.Abs(projectRoot)
	if err != nil {
		t.Fatal(err)
	}
	args = slices.Clone(args)
	for i, arg := range args {
		if file, ok := fixtures[arg]; ok {
			args[i] = filepath.Join(root, file)
		} else if strings.Contains(arg, "/testdata/") || strings.HasPrefix(arg, "deployments/") {
			args[i] = filepath.Join(root, arg)
		}
	}
	var out bytes.Buffer
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(new(bytes.Buffer))
	if input, ok := inputs[path]; ok {
		data, err := os.ReadFile(filepath.Join(root, input))
		if err != nil {
			t.Fatal(err)
		}
		cmd.SetIn(bytes.NewReader(data))
	}
	err = cmd.Execute()
	return out.String(), err
}

// In a block of the kind "console", the lines below a command that only reads files are its output;
// "…" replaces omitted lines. With -update, the output is written to the page.
func TestDocsOutput(t *testing.T) {
	update := flag.Lookup("update").Value.String() == "true"
	for _, page := range userPages(t) {
		text := page.Text
		for _, block := range page.Blocks() {
			if block.Lang != "console" {
				continue
			}
			commands, err := block.Commands()
			if err != nil || len(commands) != 1 || filepath.Base(commands[0].Words[0]) != "chandler" {
				continue // output from a cluster
			}
			first, shown, _ := strings.Cut(block.Text, "\n")
			c, err := findCommand(newCommand(), commands[0].Words[1:])
			if err != nil || !slices.Contains(readers, c.CommandPath()) {
				continue
			}
			printed, err := outputOf(t, newCommand(), c.CommandPath(), commands[0].Words[1:])
			if err != nil && command.ExitCode(err) != 2 {
				t.Errorf("%s:%d: %v", page.Path, block.Line, err)
			}
			switch {
			case shown == "" || elided(shown).MatchString(printed):
			case update && !strings.Contains(shown, "…\n"):
				text = strings.Replace(text, block.Text, first+"\n"+printed, 1)
			default:
				t.Errorf("%s:%d: output of %s (-page +program):\n%s", page.Path, block.Line, first, cmp.Diff(shown, printed))
			}
		}
		if text != page.Text {
			if err := os.WriteFile(filepath.Join(projectRoot, page.Path), []byte(text), 0o644); err != nil {
				t.Error(err)
			}
		}
	}
}

// elided returns an expression for output with omitted lines.
func elided(shown string) *regexp.Regexp {
	parts := strings.Split(shown, "…\n")
	for i := range parts {
		parts[i] = regexp.QuoteMeta(parts[i])
	}
	return regexp.MustCompile(`\A` + strings.Join(parts, `(.*\n)*`) + `\z`)
}

// Every YAML block of the documentation is valid: "kubectl chandler validate" accepts
// configurations and claims, Kubernetes types accept Kubernetes objects, and "kubectl chandler
// import" accepts configurations of other device plugins.
func TestDocsYAML(t *testing.T) {
	strict := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme.Scheme, scheme.Scheme, json.SerializerOptions{Yaml: true, Strict: true})
	for _, page := range userPages(t) {
		t.Run(page.Path, func(t *testing.T) {
			for _, block := range page.Blocks() {
				if block.Lang != "yaml" {
					if strings.Contains(block.Text, "apiVersion: ") && block.Lang != "" {
						t.Errorf("line %d: is of the kind %q, and not yaml", block.Line, block.Lang)
					}
					continue
				}
				text, err := whole(block.Text)
				if err != nil {
					t.Errorf("line %d: %v", block.Line, err)
					continue
				}
				if text == "" {
					continue // another plugin's configuration, which whole has imported
				}
				for document := range strings.SplitSeq(text, "\n---\n") {
					if strings.Contains(document, "apiVersion: chandler.dev/") && !strings.Contains(document, "opaque:") {
						continue // validate reads it
					}
					if _, _, err := strict.Decode([]byte(document), nil, nil); err != nil {
						t.Errorf("line %d: %v", block.Line, err)
					}
				}
				if out, err := stdinTo(text, "validate", "-"); err != nil {
					t.Errorf("line %d: %v\n%s", block.Line, err, out)
				}
			}
		})
	}
}

// whole returns a YAML text as an object: a part of a claim's spec becomes a claim. It returns ""
// for another device plugin's configuration, if it can be imported.
func whole(text string) (string, error) {
	var top map[string]any
	document, _, _ := strings.Cut(text, "\n---\n")
	if err := yaml.Unmarshal([]byte(document), &top); err != nil {
		return "", err
	}
	version, _ := top["apiVersion"].(string)
	group, _, _ := strings.Cut(version, "/")
	switch {
	case version == "v1", group == "chandler.dev", version != "" && scheme.Scheme.IsGroupRegistered(group):
		return text, nil
	case strings.HasPrefix(text, "# my-values.yaml"), strings.HasPrefix(text, "# deployments/platforms/"), group == "kustomize.config.k8s.io":
		return "", nil // e2e/chart passes them to Helm and kubectl
	case top["machine"] != nil:
		return "", nil // a patch of a machine configuration of Talos
	case top["config"] != nil || top["constraints"] != nil:
		return docs.ClaimWith(text), nil
	}
	if out, err := stdinTo(text, "import", "-"); err != nil && command.ExitCode(err) != 2 {
		return "", fmt.Errorf("neither Chandler's, nor Kubernetes', nor known to import: %w\n%s", err, out)
	}
	return "", nil
}

// stdinTo runs a command of kubectl-chandler with text as its standard input.
func stdinTo(text string, args ...string) (string, error) {
	cmd := newPlugin()
	var out bytes.Buffer
	cmd.SetArgs(args)
	cmd.SetIn(strings.NewReader(text))
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	err := cmd.Execute()
	return out.String(), err
}
