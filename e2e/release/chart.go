package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// The chart's directory in the project, and its main file.
const (
	chartDir  = "deployments/helm/chandler"
	chartFile = "Chart.yaml"
)

// chart packages the chart like "helm package", but with the same time in each header: Helm
// writes the modification time of each file
// (helm.sh/helm/v4@v4.3.1/pkg/chart/v2/util/save.go).
func (r *release) chart(context.Context) (err error) {
	dir := os.DirFS(filepath.Join(r.source, chartDir))
	var names []string
	err = fs.WalkDir(dir, ".", func(name string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && !strings.HasPrefix(entry.Name(), ".") {
			names = append(names, name)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	// Helm determines the type of a package by its first file.
	slices.SortStableFunc(names, func(a, b string) int { return first(a) - first(b) })
	target := filepath.Join(r.out, fmt.Sprintf("chandler-chart-%s.tgz", r.version))
	r.say("writing %s", filepath.Base(target))
	out, err := os.Create(target)
	if err != nil {
		return err
	}
	zip := gzip.NewWriter(out)
	w := tar.NewWriter(zip)
	defer func() { err = errors.Join(err, w.Close(), zip.Close(), out.Close()) }()
	for _, name := range names {
		content, err := fs.ReadFile(dir, name)
		if err != nil {
			return err
		}
		if name == chartFile {
			content = r.versioned(content)
		}
		header := &tar.Header{Typeflag: tar.TypeReg, Name: "chandler/" + name, Mode: 0o644, Size: int64(len(content)), ModTime: r.date}
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		if _, err := w.Write(content); err != nil {
			return err
		}
	}
	return nil
}

var (
	chartVersion = regexp.MustCompile(`(?m)^version:.*$`)
	appVersion   = regexp.MustCompile(`(?m)^appVersion:.*$`)
	released     = regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$`)
)

// versioned returns Chart.yaml with the release's version and image tag. If the release's
// version is not a semantic version, the chart's version is unchanged.
func (r *release) versioned(content []byte) []byte {
	content = appVersion.ReplaceAll(content, fmt.Appendf(nil, "appVersion: %q", r.version))
	if released.MatchString(r.version) {
		content = chartVersion.ReplaceAll(content, fmt.Appendf(nil, "version: %s", strings.TrimPrefix(r.version, "v")))
	}
	return content
}

func first(name string) int {
	if name == chartFile {
		return 0
	}
	return 1
}
