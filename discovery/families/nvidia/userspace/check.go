package userspace

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/internal/pattern"
)

var (
	versions  = pattern.Lazy(`^[0-9]{1,4}(\.[0-9]{1,4}){1,3}$`)
	variables = pattern.Lazy(`^[A-Z][A-Z0-9_]{0,63}$`)
)

// options lists the mount options for a driver's files. No option extends a container's
// permissions.
var options = []string{"ro", "nosuid", "nodev", "noexec", "bind", "rbind", "private", "rprivate"}

// kernelDirs are container directories where a driver has no files.
var kernelDirs = []string{"/proc", "/sys", "/dev"}

// check returns an error for every invalid part of an answer, nil if all are valid.
func (a *Answer) check() error {
	var errs []error
	if !versions().MatchString(a.Driver) {
		errs = append(errs, fmt.Errorf("no version of a driver: %.40q", a.Driver))
	}
	e := &a.Edits
	if len(e.DeviceNodes)+len(e.NetDevices)+len(e.AdditionalGIDs) > 0 || e.IntelRdt != nil {
		errs = append(errs, errors.New("it has more than mounts, hooks and variables"))
	}
	for _, m := range e.Mounts {
		if err := checkMount(m); err != nil {
			errs = append(errs, fmt.Errorf("mount: %w", err))
		}
	}
	for _, h := range e.Hooks {
		if err := checkHook(h); err != nil {
			errs = append(errs, fmt.Errorf("hook: %w", err))
		}
	}
	for _, variable := range e.Env {
		name, value, ok := strings.Cut(variable, "=")
		if !ok || !variables().MatchString(name) || !printable(value) {
			errs = append(errs, fmt.Errorf("no variable: %.60q", variable))
		}
	}
	return errors.Join(errs...)
}

func checkMount(m *specs.Mount) error {
	if m == nil {
		return errors.New("nothing")
	}
	for _, name := range []string{m.HostPath, m.ContainerPath} {
		if err := CheckPath(name); err != nil {
			return err
		}
	}
	if slices.ContainsFunc(kernelDirs, func(dir string) bool { return IsBelow(m.ContainerPath, dir) }) {
		return fmt.Errorf("%s is of the container's kernel", m.ContainerPath)
	}
	if m.Type != "" {
		return fmt.Errorf("%s: of type %.20q", m.ContainerPath, m.Type)
	}
	for _, option := range m.Options {
		if !slices.Contains(options, option) {
			return fmt.Errorf("%s: option %.20q", m.ContainerPath, option)
		}
	}
	return nil
}

func checkHook(h *specs.Hook) error {
	switch {
	case h == nil:
		return errors.New("nothing")
	case h.HookName != "createContainer":
		return fmt.Errorf("at %.40q", h.HookName)
	case h.Path != HookProgram || len(h.Args) < 2 || h.Args[0] != HookProgram:
		return fmt.Errorf("of %.40q", h.Path)
	case h.Timeout != nil:
		return errors.New("with a time limit")
	}
	for _, arg := range h.Args {
		if !printable(arg) {
			return fmt.Errorf("argument %.60q", arg)
		}
	}
	return nil
}

// CheckPath returns an error unless name is a clean, absolute path of a file.
func CheckPath(name string) error {
	if !path.IsAbs(name) || path.Clean(name) != name || name == "/" || len(name) > 4096 || !printable(name) {
		return fmt.Errorf("no path of a file: %.60q", name)
	}
	return nil
}

// IsBelow reports whether a path is dir or lies below it.
func IsBelow(name, dir string) bool {
	return name == dir || dir == "/" || strings.HasPrefix(name, dir+"/")
}

func printable(text string) bool {
	return !strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) || r == unicode.ReplacementChar })
}
