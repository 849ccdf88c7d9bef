package main

import (
	"compress/gzip"
	"errors"
	"os"
	"path/filepath"
)

// pluginArchive packs the kubectl plugin for krew, which installs programs from archives
// (deployments/krew).
func (r *release) pluginArchive(p program) (err error) {
	files := make(map[string]file)
	if err := errors.Join(addProgram(files, p), r.addLicences(files, "")); err != nil {
		return err
	}
	content, err := r.layer(files)
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
	defer func() { err = errors.Join(err, zip.Close(), out.Close()) }()
	_, err = zip.Write(content)
	return err
}
