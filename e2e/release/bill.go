package main

import (
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// billOfMaterials writes a bill of materials of the programs, based on the build information
// that Go embeds: modules and their checksums. The bill has no time and no serial number, so
// equal programs have equal bills.
func (r *release) billOfMaterials(context.Context) (err error) {
	b := bill{components: map[string]cdx.Component{}}
	product := cdx.Component{
		BOMRef: "pkg:golang/chandler.dev@" + r.version, Type: cdx.ComponentTypeApplication, Name: "chandler", Version: r.version,
		PackageURL: "pkg:golang/chandler.dev@" + r.version,
	}
	var programs []string
	for _, p := range r.built {
		ref, err := b.add(p)
		if err != nil {
			return fmt.Errorf("bill of materials: %s: %w", p.name, err)
		}
		programs = append(programs, ref)
	}
	b.depends(product.BOMRef, programs)
	bom := cdx.NewBOM()
	bom.SerialNumber = ""
	bom.Metadata = &cdx.Metadata{Component: &product}
	components := slices.SortedFunc(maps.Values(b.components), func(x, y cdx.Component) int { return strings.Compare(x.BOMRef, y.BOMRef) })
	slices.SortFunc(b.dependencies, func(x, y cdx.Dependency) int { return strings.Compare(x.Ref, y.Ref) })
	bom.Components, bom.Dependencies = &components, &b.dependencies

	target := filepath.Join(r.out, fmt.Sprintf("chandler-%s.cdx.json", r.version))
	r.say("writing %s: %d components", filepath.Base(target), len(components))
	out, err := os.Create(target)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	return cdx.NewBOMEncoder(out, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
}

// A bill is an unfinished bill of materials.
type bill struct {
	components   map[string]cdx.Component // by reference
	dependencies []cdx.Dependency
}

// add adds a program and its components, and returns the program's reference.
func (b *bill) add(p program) (ref string, err error) {
	info, err := buildinfo.ReadFile(p.path)
	if err != nil {
		return "", err
	}
	content, err := os.ReadFile(p.path)
	if err != nil {
		return "", err
	}
	var of []string
	library := func(c cdx.Component) {
		c.Type = cdx.ComponentTypeLibrary
		c.BOMRef = c.PackageURL
		b.components[c.BOMRef] = c
		of = append(of, c.BOMRef)
	}
	goVersion := strings.TrimPrefix(info.GoVersion, "go")
	library(cdx.Component{Name: "std", Version: goVersion, PackageURL: "pkg:golang/std@" + goVersion})
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		component, err := module(m)
		if err != nil {
			return "", err
		}
		library(component)
	}
	if slices.Contains(info.Settings, debug.BuildSetting{Key: "CGO_ENABLED", Value: "1"}) {
		library(cdx.Component{Name: "libc6", Version: libcVersion, PackageURL: fmt.Sprintf("pkg:deb/debian/libc6@%s?arch=%s&distro=debian-12", libcVersion, p.arch)})
	}
	ref = filepath.Base(p.path)
	b.components[ref] = cdx.Component{
		BOMRef: ref, Type: cdx.ComponentTypeApplication, Name: p.name, Description: info.Path + " for linux/" + p.arch,
		Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: fmt.Sprintf("%x", sha256.Sum256(content))}},
	}
	b.depends(ref, of)
	return ref, nil
}

func (b *bill) depends(ref string, on []string) {
	slices.Sort(on)
	b.dependencies = append(b.dependencies, cdx.Dependency{Ref: ref, Dependencies: &on})
}

// module returns the component for a Go module. A checksum as in go.sum is "h1:" and a SHA-256
// in base64.
func module(m *debug.Module) (cdx.Component, error) {
	c := cdx.Component{Name: m.Path, Version: m.Version, PackageURL: "pkg:golang/" + m.Path + "@" + m.Version}
	if sum, found := strings.CutPrefix(m.Sum, "h1:"); found {
		raw, err := base64.StdEncoding.DecodeString(sum)
		if err != nil {
			return c, fmt.Errorf("sum of %s: %w", m.Path, err)
		}
		c.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(raw)}}
	}
	return c, nil
}
