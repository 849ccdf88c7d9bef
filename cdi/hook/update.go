package hook

import (
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"runtime"
	"slices"
	"strings"
)

// updateLDCache makes the container's loader find the libraries in mounted directories.
// Distributions use different directories (/usr/lib64, /usr/lib/x86_64-linux-gnu), so the image's
// loader often does not search the directory of a library from the host.
//
// The hook does the work of ldconfig itself: ldconfig would have to run as root on files of the
// image, and many hosts have no ldconfig.
var updateLDCache = Hook{
	Name:  "update-ldcache",
	Short: "add directories to the loader's library cache",
	Flags: map[string]string{
		"folder":        "a directory of the container; libraries in the first of them are found first",
		"ldconfig-path": "of no effect; no ldconfig is run",
	},
	Run: func(c *Container, flags map[string][]string) error {
		folders := flags["folder"]
		for _, folder := range folders {
			if !path.IsAbs(folder) || strings.ContainsAny(folder, "\n:") {
				return fmt.Errorf("folder %q: not an absolute path that a loader supports", folder)
			}
		}
		if len(folders) == 0 {
			return nil
		}
		if musl, ok := muslPath(c); ok {
			return addToMuslPath(c, musl, folders)
		}
		return addToCache(c, folders)
	},
}

// Files of the GNU C library. Ldconfig reads the files in the directory in the order of their
// names.
const (
	ldCache   = "/etc/ld.so.cache"
	ldConf    = "/etc/ld.so.conf"
	ldConfDir = "/etc/ld.so.conf.d"

	preferredConf = "00-chandler-1.conf"
	foldersConf   = "00-chandler-2.conf"
)

// PreferLibraries makes the next update-ldcache put the libraries of a directory before its own.
func PreferLibraries(c *Container, folder string) error { return addToConf(c, preferredConf, folder) }

// Sizes far above those of real files.
const (
	maxCache = 64 << 20
	maxConf  = 1 << 20
)

// addToCache adds the libraries to the loader's cache, and the folders to ldconfig's configuration,
// in case the cache is rebuilt in the container.
func addToCache(c *Container, folders []string) error {
	cache, err := readCache(c)
	if err != nil {
		return err
	}
	preferred, err := c.Read(path.Join(ldConfDir, preferredConf), maxConf)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var libraries []Library
	for _, folder := range slices.Concat(strings.Fields(string(preferred)), folders) {
		found, err := librariesIn(c, folder)
		if err != nil {
			return err
		}
		libraries = append(libraries, found...)
	}
	cache.Add(libraries...)
	if err := addToConf(c, foldersConf, folders...); err != nil {
		return err
	}
	return c.Write(ldCache, cache.Bytes())
}

// readCache returns the container's cache. A missing cache, or one in an invalid format, results in
// an empty cache.
func readCache(c *Container) (*Cache, error) {
	data, err := c.Read(ldCache, maxCache)
	if errors.Is(err, fs.ErrNotExist) {
		return &Cache{}, nil
	}
	if err != nil {
		return nil, err
	}
	cache, err := ParseCache(data)
	if err != nil {
		return &Cache{}, nil //nolint:nilerr // loaders ignore it too
	}
	return cache, nil
}

// addToConf writes a file of ldconfig's configuration with directories.
func addToConf(c *Container, name string, folders ...string) error {
	const include = "include " + ldConfDir + "/*.conf\n"
	if !c.FileExists(ldConf) {
		if err := c.Write(ldConf, []byte(include)); err != nil {
			return err
		}
	}
	return c.Write(path.Join(ldConfDir, name), []byte(strings.Join(folders, "\n")+"\n"))
}

// kind has the cache's flags for libraries of this machine (FLAG_ELF_LIBC6 and the machine's flag,
// sysdeps/generic/ldconfig.h).
var kind = map[string]struct {
	machine elf.Machine
	flags   uint32
	musl    string // the machine in musl's file names
}{
	"amd64": {elf.EM_X86_64, 0x0303, "x86_64"},
	"arm64": {elf.EM_AARCH64, 0x0a03, "aarch64"},
}[runtime.GOARCH]

// librariesIn returns the libraries in a directory. It creates the missing links by which programs
// load them, such as libcuda.so.1. Existing links are also entries under their own names, as with
// ldconfig: libcuda.so, libGLX_indirect.so.0. A copy of the library may take the place of a link.
func librariesIn(c *Container, folder string) ([]Library, error) {
	entries, err := c.ListDir(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	files := make(map[string]string) // by soname
	var libraries []Library
	for _, entry := range entries {
		link := entry.Type() == fs.ModeSymlink
		if !strings.HasPrefix(entry.Name(), "lib") || !strings.Contains(entry.Name(), ".so") || !link && !entry.Type().IsRegular() {
			continue
		}
		name := soname(c, path.Join(folder, entry.Name()))
		if name == "" {
			continue
		}
		if name != entry.Name() {
			libraries = append(libraries, Library{Name: entry.Name(), Path: path.Join(folder, entry.Name()), Flags: kind.flags})
		}
		if link {
			continue
		}
		// If a folder has two versions, the later one is used, as with ldconfig.
		if other, ok := files[name]; !ok || compareNames(entry.Name(), other) > 0 {
			files[name] = entry.Name()
		}
	}
	for name, file := range files {
		link := path.Join(folder, name)
		if name != file && !c.FileExists(link) {
			if err := c.Link(file, link); err != nil {
				return nil, err
			}
		}
		libraries = append(libraries, Library{Name: name, Path: link, Flags: kind.flags})
	}
	slices.SortFunc(libraries, func(a, b Library) int { return strings.Compare(a.Name, b.Name) })
	return libraries, nil
}

// soname returns a library's own name, "" if the file is not a library for this machine.
func soname(c *Container, name string) string {
	file, err := c.Open(name)
	if err != nil {
		return ""
	}
	defer file.Close()
	library, err := elf.NewFile(file)
	if err != nil || library.Machine != kind.machine || library.Class != elf.ELFCLASS64 || library.Type != elf.ET_DYN {
		return ""
	}
	names, err := library.DynString(elf.DT_SONAME)
	if err != nil || len(names) != 1 || names[0] != path.Base(path.Clean("/"+names[0])) || len(names[0]) > 255 {
		return ""
	}
	return names[0]
}

// muslPath returns the file with the library paths of musl's loader, and whether the container has
// that loader, as Alpine does.
func muslPath(c *Container) (string, bool) {
	return "/etc/ld-musl-" + kind.musl + ".path", c.FileExists("/lib/ld-musl-" + kind.musl + ".so.1")
}

// muslDefault is the search path of musl's loader if the file is missing (ldso/dynlink.c).
const muslDefault = "/lib\n/usr/local/lib\n/usr/lib\n"

// addToMuslPath adds folders to the search path of musl's loader. Paths are separated by line
// breaks or colons.
func addToMuslPath(c *Container, name string, folders []string) error {
	known, err := c.Read(name, maxConf)
	if errors.Is(err, fs.ErrNotExist) {
		known, err = []byte(muslDefault), nil
	}
	if err != nil {
		return err
	}
	paths := strings.FieldsFunc(string(known), func(r rune) bool { return r == '\n' || r == ':' })
	for _, folder := range folders {
		if !slices.Contains(paths, folder) {
			paths = append(paths, folder)
		}
	}
	return c.Write(name, []byte(strings.Join(paths, "\n")+"\n"))
}
