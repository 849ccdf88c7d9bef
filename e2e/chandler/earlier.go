package chandler

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"chandler.dev/e2e/build"
)

// Earlier is the last revision of the agent before the ledger, with separate stores for claims
// and grants.
const Earlier = "639ba8ee5a63"

// ErrNoHistory means that the checkout lacks an earlier revision, for example in a shallow
// clone.
var ErrNoHistory = errors.New("the checkout has no such revision")

// BuildEarlier builds the agent of an earlier revision of the checkout in dir, and returns the
// program's path. It uses a separate cache, so the program of the current revision is kept.
func BuildEarlier(ctx context.Context, dir, revision string) (agent string, err error) {
	show := exec.CommandContext(ctx, "git", "-C", dir, "cat-file", "-e", revision+"^{commit}")
	if out, err := show.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s: %w: %s", ErrNoHistory, revision, err, bytes.TrimSpace(out))
	}
	source, err := os.MkdirTemp("", "chandler-"+revision+"-")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(source)) }()
	if err := unpack(ctx, dir, revision, source); err != nil {
		return "", fmt.Errorf("unpack revision %s: %w", revision, err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("cache directory: %w", err)
	}
	builder := build.Builder{Cache: filepath.Join(cache, "chandler-e2e", "earlier"), Progress: os.Stderr}
	return builder.Static(ctx, source, "chandler.dev/cmd/chandler", "-tags=grpcnotrace")
}

// unpack writes the files of a revision below a directory.
func unpack(ctx context.Context, dir, revision, to string) error {
	var stderr bytes.Buffer
	archive := exec.CommandContext(ctx, "git", "-C", dir, "archive", "--format=tar", revision)
	extract := exec.CommandContext(ctx, "tar", "-x", "-C", to)
	archive.Stderr, extract.Stderr = &stderr, &stderr
	pipe, err := archive.StdoutPipe()
	if err != nil {
		return err
	}
	extract.Stdin = pipe
	if err := archive.Start(); err != nil {
		return err
	}
	if err := errors.Join(extract.Run(), archive.Wait()); err != nil {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	return nil
}
