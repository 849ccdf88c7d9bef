package ledger

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
)

// Read returns who has which devices, by the devices' names, as the files of a
// ledger in a directory of the host say. It is for those who are not the agent,
// and only reads. Claims of another boot than that of the boot ID have nothing,
// if there is one. The devices that a damaged file names count; one that names
// nothing is an error.
func Read(host fs.FS, dir, boot string) (map[string]string, error) {
	held := make(map[string]string)
	err := addClaims(held, host, path.Join(dir, claimsDir), boot)
	data, grantsErr := fs.ReadFile(host, path.Join(dir, grantsFile))
	if errors.Is(grantsErr, fs.ErrNotExist) {
		return held, err
	}
	var grants []*Grant
	if grantsErr == nil {
		grants, grantsErr = decodeGrants(data)
	}
	if grantsErr != nil {
		grantsErr = fmt.Errorf("read grants: %w", grantsErr)
	}
	for _, g := range grants {
		for _, name := range g.Devices {
			held[name] = g.Owner().String()
		}
	}
	return held, errors.Join(err, grantsErr)
}

func addClaims(held map[string]string, host fs.FS, dir, boot string) error {
	entries, err := fs.ReadDir(host, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read claim records: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasPrefix(name, ".") {
			continue // of a writer that crashed
		}
		data, err := fs.ReadFile(host, path.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // unprepared meanwhile
		}
		if err == nil {
			err = addClaim(held, data, boot)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("read claim record %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// addClaim adds what a file names, whatever its version and checksum.
func addClaim(held map[string]string, data []byte, boot string) error {
	_, body, _ := bytes.Cut(data, []byte("\n"))
	var c Claim
	if err := json.Unmarshal(body, &c); err != nil {
		return err
	}
	if boot != "" && c.Boot != boot {
		return nil
	}
	for _, result := range c.Results {
		if result.Admin {
			continue
		}
		for _, name := range []string{result.Device, result.Source} {
			if name != "" {
				held[name] = c.Owner().String()
			}
		}
	}
	return nil
}
