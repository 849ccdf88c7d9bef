// Command release builds the files of a Chandler release: programs, container images, the
// chart, a bill of materials and checksums. It needs Go and no container runtime. The same
// source and the same version of Go produce the same files, independent of place and time.
//
// The command has a module of its own, which keeps its dependencies out of the product's
// module.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

const usage = `usage: release [FLAG...] image | image-host | all

image       the agent's image as an OCI archive
image-host  the agent's image with chandler-host, for platforms with a C compiler on this machine
all         both images, the programs, the chart, the bill of materials, and checksums`

func run(ctx context.Context, args []string, progress io.Writer) error {
	r := release{progress: progress}
	flags := flag.NewFlagSet("release", flag.ContinueOnError)
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), usage)
		flags.PrintDefaults()
	}
	flags.StringVar(&r.source, "source", "../..", "the project's `directory`")
	flags.StringVar(&r.out, "out", "../../bin/release", "`directory` for what is made")
	flags.StringVar(&r.version, "version", "dev", "the version of the programs, and the tag of the images")
	only := flags.String("platforms", strings.Join(platforms, ","), "comma-separated `list` of platforms")
	if err := flags.Parse(args); err != nil {
		return err
	}
	r.platforms = strings.Split(*only, ",")
	for _, platform := range r.platforms {
		if !slices.Contains(platforms, platform) {
			return fmt.Errorf("-platforms: %q is not one of %s", platform, strings.Join(platforms, ", "))
		}
	}
	if err := r.prepare(); err != nil {
		return err
	}
	switch flags.Arg(0) {
	case "image":
		return r.image(ctx)
	case "image-host":
		return r.imageNVML(ctx)
	case "all":
		return r.all(ctx)
	}
	return fmt.Errorf("%q is nothing to make\n%s", flags.Arg(0), usage)
}

// A release is the state of a build from the directory source into the directory out.
type release struct {
	source, out string
	version     string    // also the tag of the images
	platforms   []string  // some or all of the package's platforms
	date        time.Time // the modification time of all files
	progress    io.Writer
	built       []program
}

// prepare sets the derived fields and creates the output directory, which may contain earlier
// files.
func (r *release) prepare() (err error) {
	if r.source, err = filepath.Abs(r.source); err != nil {
		return err
	}
	if r.out, err = filepath.Abs(r.out); err != nil {
		return err
	}
	if r.date, err = sourceDate(); err != nil {
		return err
	}
	return os.MkdirAll(r.out, 0o755)
}

// sourceDate returns the time for all files, by the convention of reproducible builds:
// SOURCE_DATE_EPOCH, or else the beginning of 1970.
func sourceDate() (time.Time, error) {
	value := os.Getenv("SOURCE_DATE_EPOCH")
	if value == "" {
		return time.Unix(0, 0).UTC(), nil
	}
	seconds, err := strconv.ParseInt(value, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
	}
	return time.Unix(seconds, 0).UTC(), nil
}

// all builds everything. The checksums come last, because they cover all files.
func (r *release) all(ctx context.Context) error {
	if err := r.clear(); err != nil {
		return err
	}
	steps := []func(context.Context) error{r.image, r.imageNVML, r.programs, r.chart, r.billOfMaterials, r.checksums}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// clear removes the files of an earlier release, which the checksums would include.
func (r *release) clear() error {
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if err := os.Remove(filepath.Join(r.out, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

func (r *release) say(format string, args ...any) { fmt.Fprintf(r.progress, format+"\n", args...) }
