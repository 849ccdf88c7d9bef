package chart

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"

	"chandler.dev/internal/docs"
)

// block returns the block of docs/install.md that begins with the given line.
func block(t *testing.T, line string) string {
	t.Helper()
	page, err := docs.Read("../..", "../../docs/install.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range page.Blocks() {
		if strings.HasPrefix(b.Text, line+"\n") {
			return b.Text
		}
	}
	t.Fatalf("docs/install.md has no block %q", line)
	return ""
}

// TestValuesOfDocs renders the chart with the values that docs/install.md shows.
func TestValuesOfDocs(t *testing.T) {
	if got := config(t, block(t, "# my-values.yaml")); len(got.Exclude) != 1 {
		t.Errorf("got %+v", got)
	}
	page, err := docs.Read("../..", "../../docs/install.md")
	if err != nil {
		t.Fatal(err)
	}
	groups := 0
	for _, b := range page.Blocks() {
		if strings.HasPrefix(b.Text, "# my-values.yaml\nnodeGroups:") {
			groups = len(rendered[appsv1.DaemonSet](t, "daemonset.yaml", b.Text))
		}
	}
	if groups != 3 {
		t.Errorf("the groups of nodes have %d DaemonSets", groups)
	}
}

// TestValuesOfPlatforms renders the chart with each file in deployments/platforms, and checks the
// configuration. A page in docs/platforms shows each file.
func TestValuesOfPlatforms(t *testing.T) {
	pages, err := filepath.Glob("../../docs/platforms/*.md")
	if err != nil {
		t.Fatal(err)
	}
	shown := make(map[string]string) // by the path of the file
	for _, name := range pages {
		page, err := docs.Read("../..", name)
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, b := range page.Blocks() {
			if line, _, _ := strings.Cut(b.Text, "\n"); strings.HasPrefix(line, "# deployments/platforms/") {
				shown[strings.TrimPrefix(line, "# ")] = b.Text
				found = true
			}
		}
		if !found && filepath.Base(name) != "index.md" {
			t.Errorf("%s shows no values", page.Path)
		}
	}
	files, err := filepath.Glob("../../deployments/platforms/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		path := "deployments/platforms/" + filepath.Base(file)
		if shown[path] != string(data) {
			t.Errorf("no page shows %s as it is", path)
		}
		delete(shown, path)
		config(t, string(data))
		mustRender(t, string(data))
	}
	if len(shown) > 0 {
		t.Errorf("there are no files %q", slices.Sorted(maps.Keys(shown)))
	}
}

// kustomized checks that kubectl kustomize accepts the kustomization of docs/install.md.
func (in *installed) kustomized() {
	in.t.Helper()
	dir := in.t.TempDir()
	if err := os.CopyFS(filepath.Join(dir, "deployments"), os.DirFS(deployments)); err != nil {
		in.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(block(in.t, "# kustomization.yaml")), 0o600); err != nil {
		in.t.Fatal(err)
	}
	cmd := in.node.Kubectl(within(in.t), "kustomize", dir)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "name: nvidia-mps") {
		in.t.Errorf("kubectl kustomize: %v\n%s", err, out)
	}
}
