package allocation

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// ReadOwners returns the owners of devices, by the name of the device, from the files of a ledger
// in a directory of the host. Read is for programs other than the agent. If boot is not "", claims
// of another boot own nothing. The devices in a damaged file are included; a damaged file without
// devices is an error.
func ReadOwners(host fs.FS, dir, boot string) (map[string]string, error) {
	entries, err := ReadEntries(host, dir, boot)
	held := make(map[string]string)
	for _, e := range entries {
		switch e := e.(type) {
		case *Claim:
			for _, result := range e.Results {
				for _, name := range []string{result.Device, result.Source} {
					if name != "" && !result.Admin {
						held[name] = e.Owner().String()
					}
				}
			}
		case *Grant:
			for _, name := range e.Devices {
				held[name] = e.Owner().String()
			}
		}
	}
	return held, err
}

// ReadEntries returns the claims and grants whose devices [ReadOwners] returns.
func ReadEntries(host fs.FS, dir, boot string) (entries []Entry, err error) {
	claims, err := readClaims(host, path.Join(dir, ClaimsDir), boot)
	for _, c := range claims {
		entries = append(entries, c)
	}
	data, grantsErr := fs.ReadFile(host, path.Join(dir, GrantsFile))
	if errors.Is(grantsErr, fs.ErrNotExist) {
		return entries, err
	}
	var grants []*Grant
	if grantsErr == nil {
		grants, grantsErr = DecodeGrants(data)
	}
	if grantsErr != nil {
		grantsErr = fmt.Errorf("read grants: %w", grantsErr)
	}
	for _, g := range grants {
		entries = append(entries, g)
	}
	return entries, errors.Join(err, grantsErr)
}

// ReadSince returns the time since when a claim has its devices, from the files of a ledger: the
// time in its record, or else the modification time of the record, or zero if neither is known.
func ReadSince(host fs.FS, dir string, uid types.UID) time.Time {
	file := path.Join(dir, ClaimsDir, string(uid)+ClaimExtension)
	if data, err := fs.ReadFile(host, file); err == nil {
		if c, err := DecodeClaim(data); err == nil && !c.Since.IsZero() {
			return c.Since
		}
	}
	info, err := fs.Stat(host, file)
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}

// RecordError is the error of a claim record that cannot be read.
type RecordError struct {
	File string // without the directory
	Err  error
}

// Error implements error.
func (e *RecordError) Error() string { return fmt.Sprintf("read claim record %s: %s", e.File, e.Err) }

// Unwrap returns the cause.
func (e *RecordError) Unwrap() error { return e.Err }

func readClaims(host fs.FS, dir, boot string) (claims []*Claim, err error) {
	entries, err := fs.ReadDir(host, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read claim records: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasPrefix(name, ".") {
			continue // left by a crashed writer
		}
		data, err := fs.ReadFile(host, path.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // unprepared meanwhile
		}
		c := &Claim{}
		if err == nil {
			_, body, _ := bytes.Cut(data, []byte("\n")) // of any version and checksum
			err = json.Unmarshal(body, c)
		}
		if err != nil {
			errs = append(errs, &RecordError{File: name, Err: err})
			continue
		}
		if boot == "" || c.Boot == boot {
			claims = append(claims, c)
		}
	}
	return claims, errors.Join(errs...)
}
