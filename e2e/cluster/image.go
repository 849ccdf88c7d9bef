package cluster

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
)

// An Image is a container image with static programs and data files of the host, without a
// base image.
type Image struct {
	// Name includes a tag, as in localhost/probe:1. Containers must set imagePullPolicy: Never.
	Name string
	// Files maps paths in the image to paths on the host. Permissions are kept.
	Files map[string]string
	// Entrypoint is the program with its first arguments.
	Entrypoint []string
	// Env is added to PATH.
	Env []string
}

// LoadImage builds the image and loads it into the node's containerd, replacing an image of
// the same name.
func (n *Node) LoadImage(ctx context.Context, image Image) error {
	archive, err := image.archive()
	if err != nil {
		return fmt.Errorf("make image %s: %w", image.Name, err)
	}
	if err := n.ImportImages(ctx, archive); err != nil {
		return fmt.Errorf("load image %s: %w", image.Name, err)
	}
	n.say("loaded image %s", image.Name)
	return nil
}

// ImportImages loads the images of an archive into the node's containerd, by "ctr images import".
func (n *Node) ImportImages(ctx context.Context, archive io.Reader) error {
	cmd := n.machine.Command(ctx, n.fileOf("ctr"), "ctr", "--address", containerdSocket,
		"--namespace", "k8s.io", "images", "import", "-")
	cmd.Env = n.environment()
	cmd.Stdin = archive
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("import images: %w\n%s", err, bytes.TrimSpace(out))
	}
	return nil
}

// archive returns the image in the format of docker save. Equal files lead to equal archives.
func (i Image) archive() (io.Reader, error) {
	layer, err := i.layer()
	if err != nil {
		return nil, err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH,
		"os":           runtime.GOOS,
		"config": map[string]any{
			"Entrypoint": i.Entrypoint,
			"Env":        append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, i.Env...),
		},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(layer)}},
	})
	if err != nil {
		return nil, err
	}
	manifest, err := json.Marshal([]any{map[string]any{
		"Config":   "config.json",
		"RepoTags": []string{i.Name},
		"Layers":   []string{"layer.tar"},
	}})
	if err != nil {
		return nil, err
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for _, part := range []struct {
		name    string
		content []byte
	}{{"layer.tar", layer}, {"config.json", config}, {"manifest.json", manifest}} {
		if err := addFile(w, part.name, 0o644, part.content); err != nil {
			return nil, err
		}
	}
	return &archive, w.Close()
}

func digest(content []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(content)) }

// layer returns a layer with the files, their directories, and /tmp.
func (i Image) layer() ([]byte, error) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "tmp/", Mode: 0o1777}); err != nil {
		return nil, err
	}
	made := map[string]bool{".": true, "tmp": true}
	for _, target := range slices.Sorted(maps.Keys(i.Files)) {
		if err := addHostFile(w, made, strings.TrimPrefix(path.Clean(target), "/"), i.Files[target]); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return layer.Bytes(), nil
}

func addHostFile(w *tar.Writer, made map[string]bool, target, source string) error {
	content, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	if err := addDirs(w, made, path.Dir(target)); err != nil {
		return err
	}
	return addFile(w, target, int64(info.Mode().Perm()), content)
}

// addDirs adds a directory after its parents, unless already added.
func addDirs(w *tar.Writer, made map[string]bool, dir string) error {
	if made[dir] {
		return nil
	}
	if err := addDirs(w, made, path.Dir(dir)); err != nil {
		return err
	}
	made[dir] = true
	return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755})
}

func addFile(w *tar.Writer, name string, mode int64, content []byte) error {
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(content))}); err != nil {
		return err
	}
	_, err := w.Write(content)
	return err
}
