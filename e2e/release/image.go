package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// repository is the name of the images in the archives.
const repository = "chandler.dev/chandler"

// A file is a file in an image.
type file struct {
	mode    int64
	content []byte
	link    string // target of a symbolic link, which has no content
}

// image builds the agent's image, which contains only the agent.
func (r *release) image(ctx context.Context) error {
	images := make(map[string]v1.Image)
	for _, arch := range r.platforms {
		agent, err := r.agent(ctx, arch)
		if err != nil {
			return err
		}
		files := make(map[string]file)
		if err := addProgram(files, agent); err != nil {
			return err
		}
		if images[arch], err = r.imageOf(arch, files); err != nil {
			return err
		}
	}
	return r.writeImage("chandler", r.version, images)
}

// imageNVML builds the agent's image with NVML support: the agent, chandler-host, and the C
// library for chandler-host and NVML. Platforms without a C compiler on this machine are
// omitted.
func (r *release) imageNVML(ctx context.Context) error {
	images := make(map[string]v1.Image)
	for _, arch := range r.platforms {
		compiler := compilerFor(arch)
		if compiler == "" {
			r.say("LEFT OUT: the image with NVML for linux/%s, for lack of %s (on Debian: apt-get install %s)",
				arch, compilers[arch], strings.ReplaceAll("gcc-"+strings.TrimSuffix(compilers[arch], "-gcc"), "_", "-"))
			continue
		}
		files, err := r.libc(ctx, arch)
		if err != nil {
			return err
		}
		agent, err := r.agent(ctx, arch)
		if err != nil {
			return err
		}
		informant, err := r.informant(ctx, arch, compiler)
		if err != nil {
			return err
		}
		if err := errors.Join(addProgram(files, agent), addProgram(files, informant)); err != nil {
			return err
		}
		if images[arch], err = r.imageOf(arch, files); err != nil {
			return err
		}
	}
	if len(images) == 0 {
		return errors.New("image with NVML: there is no C compiler")
	}
	return r.writeImage("chandler-host", r.version+"-host", images)
}

func addProgram(files map[string]file, p program) error {
	content, err := os.ReadFile(p.path)
	files[p.name] = file{mode: 0o755, content: content}
	return err
}

// licenceFiles are the licence of the project, and the list of the licences of its modules.
var licenceFiles = []string{"LICENSE", "docs/licences.md"}

// addLicences adds the licences to the files of an image or an archive, in a directory.
func (r *release) addLicences(files map[string]file, dir string) error {
	for _, name := range licenceFiles {
		content, err := os.ReadFile(filepath.Join(r.source, name))
		if err != nil {
			return err
		}
		files[path.Join(dir, path.Base(name))] = file{mode: 0o644, content: content}
	}
	return nil
}

// imageOf returns the image of a platform, with one layer.
func (r *release) imageOf(arch string, files map[string]file) (v1.Image, error) {
	if err := r.addLicences(files, "licenses"); err != nil {
		return nil, err
	}
	content, err := r.layer(files)
	if err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil }
	layer, err := tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err = mutate.ConfigFile(image, &v1.ConfigFile{
		Architecture: arch,
		OS:           "linux",
		Created:      v1.Time{Time: r.date},
		RootFS:       v1.RootFS{Type: "layers"},
		Config: v1.Config{
			Entrypoint: []string{"/chandler"},
			Env:        []string{"PATH=/"},
			Labels: map[string]string{
				"org.opencontainers.image.title":    "chandler",
				"org.opencontainers.image.version":  r.version,
				"org.opencontainers.image.licenses": "Apache-2.0",
			},
		},
	})
	if err != nil {
		return nil, err
	}
	return mutate.Append(image, mutate.Addendum{Layer: layer, History: v1.History{Created: v1.Time{Time: r.date}, CreatedBy: "release"}})
}

// layer returns an archive of the files and their directories.
func (r *release) layer(files map[string]file) ([]byte, error) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	made := map[string]bool{".": true}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := r.addDirectories(w, made, path.Dir(name)); err != nil {
			return nil, err
		}
		f := files[name]
		header := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: f.mode, Size: int64(len(f.content)), ModTime: r.date}
		if f.link != "" {
			header.Typeflag, header.Linkname, header.Mode = tar.TypeSymlink, f.link, 0o777
		}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.content); err != nil {
			return nil, err
		}
	}
	return layer.Bytes(), w.Close()
}

// addDirectories adds a directory after its parents, unless already added.
func (r *release) addDirectories(w *tar.Writer, made map[string]bool, dir string) error {
	if made[dir] {
		return nil
	}
	if err := r.addDirectories(w, made, path.Dir(dir)); err != nil {
		return err
	}
	made[dir] = true
	return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755, ModTime: r.date})
}

// writeImage writes the images of all platforms as one OCI archive with an index of platforms.
func (r *release) writeImage(name, tag string, images map[string]v1.Image) (err error) {
	index := v1.ImageIndex(mutate.IndexMediaType(empty.Index, types.OCIImageIndex))
	for _, arch := range slices.Sorted(maps.Keys(images)) {
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        images[arch],
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	dir, err := os.MkdirTemp("", "chandler-image-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	written, err := layout.Write(dir, mutate.IndexMediaType(empty.Index, types.OCIImageIndex))
	if err != nil {
		return err
	}
	// The first annotation is the specification's for the tag. containerd, and thereby Docker, use
	// the second for the image's name.
	err = written.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"org.opencontainers.image.ref.name": tag,
		"io.containerd.image.name":          repository + ":" + tag,
	}))
	if err != nil {
		return err
	}
	target := filepath.Join(r.out, fmt.Sprintf("%s-%s-image.tar", name, r.version))
	r.say("writing %s: %s:%s for %s", filepath.Base(target), repository, tag, strings.Join(slices.Sorted(maps.Keys(images)), ", "))
	return r.archive(target, os.DirFS(dir))
}

// archive writes the files of a directory into an archive, in directory order.
func (r *release) archive(target string, dir fs.FS) (err error) {
	out, err := os.Create(target)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	w := tar.NewWriter(out)
	err = fs.WalkDir(dir, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		if entry.IsDir() {
			return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, ModTime: r.date})
		}
		content, err := fs.ReadFile(dir, name)
		if err != nil {
			return err
		}
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content)), ModTime: r.date}); err != nil {
			return err
		}
		_, err = w.Write(content)
		return err
	})
	return errors.Join(err, w.Close())
}
