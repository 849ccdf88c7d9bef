package guest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A moduleList is the output of depmod for a kernel.
type moduleList struct {
	file    map[string]string   // by name of the module
	needs   map[string][]string // dependencies of a file
	soft    map[string][]string // modules to load before or after a module
	builtin map[string]bool
	err     error // of closure
}

func readModules(dir string) (*moduleList, error) {
	l := &moduleList{file: map[string]string{}, needs: map[string][]string{}, soft: map[string][]string{}, builtin: map[string]bool{}}
	dep, err := os.ReadFile(filepath.Join(dir, "modules.dep"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(dep)) {
		file, needs, _ := strings.Cut(line, ":")
		l.file[moduleName(file)] = file
		l.needs[file] = strings.Fields(needs)
	}
	builtin, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	for file := range strings.FieldsSeq(string(builtin)) {
		l.builtin[moduleName(file)] = true
	}
	soft, err := os.ReadFile(filepath.Join(dir, "modules.softdep"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(soft)) { // softdep NAME pre: NAME… post: NAME…
		fields := strings.Fields(line)
		if len(fields) < 3 || fields[0] != "softdep" {
			continue
		}
		for _, field := range fields[2:] {
			if !strings.HasSuffix(field, ":") {
				name := moduleName(fields[1])
				l.soft[name] = append(l.soft[name], moduleName(field))
			}
		}
	}
	return l, nil
}

// moduleName returns the kernel's name of the module in a file.
func moduleName(file string) string {
	name, _, _ := strings.Cut(filepath.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// closure returns the files of the modules and their dependencies. Built-in modules have no file.
// For a module that the kernel does not have, closure sets err.
func (l *moduleList) closure(modules []string) []string {
	var files []string
	var add func(file string)
	add = func(file string) {
		if slices.Contains(files, file) {
			return
		}
		files = append(files, file)
		for _, needed := range l.needs[file] {
			add(needed)
		}
		for _, soft := range l.soft[moduleName(file)] {
			if file, known := l.file[soft]; known {
				add(file)
			}
		}
	}
	for _, module := range modules {
		name := moduleName(module)
		file, known := l.file[name]
		switch {
		case known:
			add(file)
		case !l.builtin[name]:
			l.err = fmt.Errorf("the kernel has no module %s", module)
		}
	}
	return files
}
