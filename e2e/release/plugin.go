package main

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"os"
	"path/filepath"
)

// pluginArchive packs the kubectl plugin for krew, which installs programs from archives
// (deployments/krew).
func (r *release) pluginArchive(p program) (err error) {
	content, err := os.ReadFile(p.path)
	if err != nil {
		return err
	}
	target := p.path + ".tar.gz"
	r.say("writing %s", filepath.Base(target))
	out, err := os.Create(target)
	if err != nil {
		return err
	}
	zip := gzip.NewWriter(out)
	w := tar.NewWriter(zip)
	defer func() { err = errors.Join(err, w.Close(), zip.Close(), out.Close()) }()
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: p.name, Mode: 0o755, Size: int64(len(content)), ModTime: r.date}); err != nil {
		return err
	}
	_, err = w.Write(content)
	return err
}
