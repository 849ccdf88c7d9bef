package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	cdx "github.com/CycloneDX/cyclonedx-go"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

const version = "v0.0.0-test"

// The same source leads to the same files in any directory.
func TestReleaseIsReproducible(t *testing.T) {
	first, second := t.TempDir(), t.TempDir()
	elsewhere := filepath.Join(t.TempDir(), "else", "where")
	copySource(t, elsewhere)
	release := func(source, out string, env ...string) string {
		for i := 0; i < len(env); i += 2 {
			t.Setenv(env[i], env[i+1])
		}
		if err := run(t.Context(), []string{"-source", source, "-out", out, "-version", version, "all"}, t.Output()); err != nil {
			t.Fatal(err)
		}
		return read(t, filepath.Join(out, "SHA256SUMS"))
	}
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	sums := release("../..", first)
	// The second run has different build settings in its environment, and its files have a
	// different umask.
	if again := release(elsewhere, second, "GOFLAGS", "-ldflags=-v -tags=other", "GOAMD64", "v3", "TZ", "Asia/Tokyo"); again != sums {
		t.Errorf("first:\n%s\nsecond:\n%s", sums, again)
	}
	t.Run("checksums", func(t *testing.T) { checksums(t, first, sums) })
	t.Run("image", func(t *testing.T) {
		root := image(t, filepath.Join(first, "chandler-"+version+"-image.tar"), platforms)
		if files := names(t, root); !slices.Equal(files, []string{"chandler", "licenses/LICENSE", "licenses/licences.md"}) {
			t.Errorf("files %q", files)
		}
		if out := within(t, root, "/chandler", "version"); !strings.Contains(out, version) {
			t.Errorf("chandler version says %q", out)
		}
	})
	t.Run("image with NVML", func(t *testing.T) {
		var with []string
		for _, arch := range platforms {
			if compilerFor(arch) != "" {
				with = append(with, arch)
			}
		}
		root := image(t, filepath.Join(first, "chandler-host-"+version+"-image.tar"), with)
		files := names(t, root)
		if !slices.Contains(files, "chandler") || len(files) > 2+len(licenceFiles)+len(libcFiles)+1 {
			t.Errorf("files %q", files)
		}
		// The program gets as far as the search for NVML, so the C library is complete.
		if out := within(t, root, "/chandler-host"); !strings.Contains(strings.ToLower(out), "nvml") || strings.Contains(out, "shared libraries") {
			t.Errorf("chandler-host says %q", out)
		}
	})
	t.Run("plugin", func(t *testing.T) {
		plugin(t, filepath.Join(first, "kubectl-chandler-"+version+"-linux-"+runtime.GOARCH))
	})
	t.Run("chart", func(t *testing.T) { chart(t, filepath.Join(first, "chandler-chart-"+version+".tgz")) })
	t.Run("bill of materials", func(t *testing.T) { bom(t, filepath.Join(first, "chandler-"+version+".cdx.json"), sums) })
}

// plugin verifies the kubectl plugin and its archive: the program's name is the name in the krew
// manifest.
func plugin(t *testing.T, path string) {
	t.Helper()
	zipped, err := gzip.NewReader(strings.NewReader(read(t, path+".tar.gz")))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	unpack(t, zipped, dir)
	if files := names(t, dir); !slices.Equal(files, []string{"LICENSE", "kubectl-chandler", "licences.md"}) {
		t.Errorf("files %q", files)
	}
	if manifest := read(t, "../../deployments/krew/chandler.yaml"); strings.Count(manifest, "\n    bin: kubectl-chandler\n") != len(platforms) {
		t.Errorf("the krew manifest names another program:\n%s", manifest)
	}
	packed := filepath.Join(dir, "kubectl-chandler")
	if read(t, packed) != read(t, path) {
		t.Error("the archive has another program")
	}
	out, err := exec.Command(packed, "version").CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "kubectl-chandler "+version+" go") {
		t.Errorf("version prints %q, %v", out, err)
	}
}

// copySource copies the source of the project's programs and chart.
func copySource(t *testing.T, to string) {
	t.Helper()
	for _, dir := range []string{"api", "cdi", "cmd", "deployments", "discovery", "driver", "internal", "legacy"} {
		if err := os.CopyFS(filepath.Join(to, dir), os.DirFS(filepath.Join("../..", dir))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(to, "docs"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range append([]string{"go.mod", "go.sum"}, licenceFiles...) {
		if err := os.WriteFile(filepath.Join(to, name), []byte(read(t, filepath.Join("../..", name))), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// checksums verifies that the checksums are correct and cover all files.
func checksums(t *testing.T, dir, sums string) {
	check := exec.Command("sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS")
	check.Dir = dir
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(sums, "\n"); lines != len(entries)-1 {
		t.Errorf("%d sums of %d files:\n%s", lines, len(entries)-1, sums)
	}
}

// image verifies that an archive is a valid image for the platforms, and returns a directory
// with the files for this machine's platform.
func image(t *testing.T, archive string, platforms []string) (root string) {
	t.Helper()
	dir := t.TempDir()
	unpack(t, strings.NewReader(read(t, archive)), dir)
	outer, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := outer.IndexManifest()
	if err != nil || len(manifest.Manifests) != 1 {
		t.Fatalf("%+v, %v", manifest, err)
	}
	if name := manifest.Manifests[0].Annotations["io.containerd.image.name"]; !strings.HasPrefix(name, repository+":"+version) {
		t.Errorf("it is called %q", name)
	}
	index, err := outer.ImageIndex(manifest.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	if manifest, err = index.IndexManifest(); err != nil {
		t.Fatal(err)
	}
	var of []string
	for _, m := range manifest.Manifests {
		of = append(of, m.Platform.Architecture)
		if m.Platform.Architecture == runtime.GOARCH {
			root = files(t, index, m)
		}
	}
	if !slices.Equal(of, platforms) {
		t.Errorf("it is for %q, want %q", of, platforms)
	}
	return root
}

// files unpacks the image of one platform.
func files(t *testing.T, index v1.ImageIndex, m v1.Descriptor) (root string) {
	t.Helper()
	of, err := index.Image(m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	config, err := of.ConfigFile()
	if err != nil || config.Architecture != m.Platform.Architecture || !slices.Equal(config.Config.Entrypoint, []string{"/chandler"}) || config.Created.Unix() != 1700000000 {
		t.Errorf("configuration %+v, %v", config, err)
	}
	root = t.TempDir()
	unpack(t, mutate.Extract(of), root)
	return root
}

func unpack(t *testing.T, archive io.Reader, to string) {
	t.Helper()
	root, err := os.OpenRoot(to)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for r := tar.NewReader(archive); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		switch header.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(filepath.Clean(header.Name), 0o755)
		case tar.TypeSymlink:
			err = root.Symlink(header.Linkname, header.Name)
		default:
			if err := root.MkdirAll(filepath.Dir(filepath.Clean(header.Name)), 0o755); err != nil {
				t.Fatal(err)
			}
			var content bytes.Buffer
			if _, err = io.Copy(&content, r); err == nil {
				err = root.WriteFile(header.Name, content.Bytes(), fs.FileMode(header.Mode))
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// names returns the files below a directory, without directories.
func names(t *testing.T, root string) (names []string) {
	t.Helper()
	err := fs.WalkDir(os.DirFS(root), ".", func(name string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			names = append(names, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// within runs a program with only the image's files, as a container would, and returns its
// output.
func within(t *testing.T, root string, command ...string) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, for chroot")
	}
	out, err := exec.Command("chroot", append([]string{root}, command...)...).CombinedOutput()
	return fmt.Sprint(string(out), err)
}

// chart verifies that a chart is complete and has the release's version.
func chart(t *testing.T, path string) {
	unzipped, err := gzip.NewReader(strings.NewReader(read(t, path)))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	unpack(t, unzipped, dir)
	for _, line := range []string{"\nversion: 0.0.0-test\n", "\nappVersion: \"" + version + "\"\n"} {
		if got := read(t, filepath.Join(dir, "chandler", chartFile)); !strings.Contains(got, line) {
			t.Errorf("no %q in\n%s", line, got)
		}
	}
	if got, want := names(t, filepath.Join(dir, "chandler")), names(t, filepath.Join("../..", chartDir)); !slices.Equal(got, want) {
		t.Errorf("it has %q, want %q", got, want)
	}
}

// bom verifies that the bill contains the programs with their checksums, and modules with the
// versions in go.mod.
func bom(t *testing.T, path, sums string) {
	var bill cdx.BOM
	if err := cdx.NewBOMDecoder(strings.NewReader(read(t, path)), cdx.BOMFileFormatJSON).Decode(&bill); err != nil {
		t.Fatal(err)
	}
	if bill.Metadata.Timestamp != "" || bill.SerialNumber != "" {
		t.Errorf("its time is %q, its serial number %q", bill.Metadata.Timestamp, bill.SerialNumber)
	}
	components := make(map[string]cdx.Component)
	for _, c := range *bill.Components {
		components[c.BOMRef] = c
	}
	for line := range strings.Lines(sums) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		if !strings.Contains(name, "-linux-") || strings.HasSuffix(name, ".tar.gz") {
			continue
		}
		if c, found := components[name]; !found || (*c.Hashes)[0].Value != sum {
			t.Errorf("%s: %+v", name, c)
		}
	}
	for line := range strings.Lines(read(t, "../../go.mod")) {
		fields := strings.Fields(line)
		if len(fields) == 2 && (fields[0] == "k8s.io/client-go" || fields[0] == "github.com/spf13/cobra") {
			if c := components["pkg:golang/"+fields[0]+"@"+fields[1]]; c.Hashes == nil || len((*c.Hashes)[0].Value) != 64 {
				t.Errorf("%s: %+v", line, c)
			}
		}
	}
	for _, d := range *bill.Dependencies {
		for _, on := range *d.Dependencies {
			if _, found := components[on]; !found {
				t.Errorf("%s depends on %s, which is not there", d.Ref, on)
			}
		}
	}
}

// A file with the wrong digest is rejected.
func TestDigest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "libc6.deb")
	if err := os.WriteFile(path, []byte("another"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := is(path, libcDigests["amd64"]); err == nil || !strings.Contains(err.Error(), "its SHA-256 is") {
		t.Error(err)
	}
}

// TestUnknownPlatform expects a mistyped platform to be an error before anything is built.
func TestUnknownPlatform(t *testing.T) {
	out := t.TempDir()
	err := run(t.Context(), []string{"-out", out, "-platforms", "amd64,sparc", "image"}, t.Output())
	if err == nil || !strings.Contains(err.Error(), `"sparc" is not one of amd64, arm64`) {
		t.Errorf("got %v", err)
	}
	if entries, err := os.ReadDir(out); err != nil || len(entries) > 0 {
		t.Errorf("built %v, %v", entries, err)
	}
}
