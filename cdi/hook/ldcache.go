package hook

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// A Library is one entry of /etc/ld.so.cache, the library cache of the GNU C library's loader.
type Library struct {
	Name string // the name in programs, such as "libcuda.so.1"
	Path string

	Flags     uint32 // the library's kind and machine
	OSVersion uint32 // the oldest supported kernel; no longer used
	HWCap     uint64 // the required processor; may refer to Cache.HWCaps
}

// Cache is the loader's cache. The format is that of glibc since 2.2, "glibc-ld.so.cache1.1"
// (sysdeps/generic/dl-cache.h and elf/cache.c; extensions exist since 2.33). All later versions
// read the caches of this package.
type Cache struct {
	Libraries []Library // in the loader's order
	HWCaps    []string  // names of subdirectories of glibc-hwcaps; entries refer to them by number
	Generator string
}

const (
	oldMagic   = "ld.so-1.7.0\x00"         // a table in the old format before the new one, from old versions of glibc
	newMagic   = "glibc-ld.so.cache1.1"    // the table since glibc 2.2
	oldHeader  = 16                        // bytes: magic, number of entries
	oldEntry   = 12                        // bytes
	newHeader  = 48                        // bytes: magic, number of entries, length of strings, byte order, extensions
	newEntry   = 24                        // bytes: flags, name, path, kernel, processor
	extMagic   = 0xeaa42174                // of the directory of extensions
	extEntry   = 16                        // bytes: tag, flags, offset, size
	tagMaker   = 0                         // the extension with the name of the cache's generator
	tagHWCaps  = 1                         // the extension with the names of glibc-hwcaps subdirectories
	littleEnd  = 2                         // the byte order, which is 0 in old versions
	maxEntries = 1 << 20                   // far above any real number of libraries
	generator  = "chandler update-ldcache" // our name in the generator extension
)

var order = binary.LittleEndian // the byte order of all supported machines

// ParseCache reads the content of /etc/ld.so.cache.
func ParseCache(data []byte) (*Cache, error) {
	if bytes.HasPrefix(data, []byte(oldMagic)) && len(data) >= oldHeader {
		skip := uint64(oldHeader) + uint64(order.Uint32(data[12:]))*oldEntry
		skip = (skip + 7) &^ 7
		if skip > uint64(len(data)) {
			return nil, errors.New("loader's cache: cut off")
		}
		data = data[skip:] // offsets are relative to this table
	}
	if len(data) < newHeader || !bytes.HasPrefix(data, []byte(newMagic)) {
		return nil, errors.New("loader's cache: of an unknown format")
	}
	if end := data[28] & 3; end != 0 && end != littleEnd {
		return nil, errors.New("loader's cache: of another byte order")
	}
	n := order.Uint32(data[20:])
	if n > maxEntries || uint64(len(data)) < newHeader+uint64(n)*newEntry {
		return nil, errors.New("loader's cache: cut off")
	}
	cache := &Cache{}
	for i := range int(n) {
		entry := data[newHeader+i*newEntry:]
		name, nameErr := stringAt(data, order.Uint32(entry[4:]))
		file, fileErr := stringAt(data, order.Uint32(entry[8:]))
		if err := errors.Join(nameErr, fileErr); err != nil {
			return nil, fmt.Errorf("loader's cache: entry %d: %w", i, err)
		}
		cache.Libraries = append(cache.Libraries, Library{
			Name: name, Path: file, Flags: order.Uint32(entry),
			OSVersion: order.Uint32(entry[12:]), HWCap: order.Uint64(entry[16:]),
		})
	}
	if err := cache.parseExtensions(data, order.Uint32(data[32:])); err != nil {
		return nil, fmt.Errorf("loader's cache: extensions: %w", err)
	}
	return cache, nil
}

func (c *Cache) parseExtensions(data []byte, at uint32) error {
	if at == 0 { // the format before 2.33
		return nil
	}
	directory, err := sliceAt(data, at, 8)
	if err != nil {
		return err
	}
	if order.Uint32(directory) != extMagic {
		return errors.New("of an unknown format")
	}
	n := order.Uint32(directory[4:])
	if n > 1024 {
		return fmt.Errorf("%d of them", n)
	}
	for i := range n {
		entry, err := sliceAt(data, at+8+i*extEntry, extEntry)
		if err != nil {
			return err
		}
		content, err := sliceAt(data, order.Uint32(entry[8:]), order.Uint32(entry[12:]))
		if err != nil {
			return err
		}
		switch order.Uint32(entry) {
		case tagMaker:
			c.Generator = strings.TrimRight(string(content), "\x00")
		case tagHWCaps:
			for ; len(content) >= 4; content = content[4:] {
				name, err := stringAt(data, order.Uint32(content))
				if err != nil {
					return err
				}
				c.HWCaps = append(c.HWCaps, name)
			}
		}
	}
	return nil
}

// sliceAt returns length bytes at an offset.
func sliceAt(data []byte, at, length uint32) ([]byte, error) {
	if uint64(at)+uint64(length) > uint64(len(data)) {
		return nil, errors.New("cut off")
	}
	return data[at : at+length], nil
}

// maxString is longer than any path.
const maxString = 4096

func stringAt(data []byte, at uint32) (string, error) {
	if uint64(at) >= uint64(len(data)) {
		return "", errors.New("a text outside the file")
	}
	text, _, ended := bytes.Cut(data[at:min(len(data), int(at)+maxString)], []byte{0})
	if !ended {
		return "", errors.New("a text without an end")
	}
	return string(text), nil
}

// Add puts libraries before those of the same name in the cache, so that the loader finds the new
// ones first, in the given order. A library whose path is already in the cache stays at its place.
func (c *Cache) Add(libraries ...Library) {
	var added []Library
	for _, library := range libraries {
		same := func(l Library) bool {
			return l.Name == library.Name && l.Path == library.Path && l.Flags == library.Flags
		}
		if !slices.ContainsFunc(c.Libraries, same) && !slices.ContainsFunc(added, same) {
			added = append(added, library)
		}
	}
	c.Libraries = append(added, c.Libraries...)
	// The loader uses binary search, so the order is part of the format.
	slices.SortStableFunc(c.Libraries, func(a, b Library) int { return compareNames(b.Name, a.Name) })
}

// compareNames is the order of _dl_cache_libcmp (elf/dl-cache.c): digits are compared as numbers.
func compareNames(a, b string) int {
	isDigit := func(s string, i int) bool { return i < len(s) && s[i] >= '0' && s[i] <= '9' }
	number := func(s string, i int) (value int32, end int) {
		for ; isDigit(s, i); i++ {
			value = value*10 + int32(s[i]-'0') // overflows like glibc's
		}
		return value, i
	}
	i, j := 0, 0
	for i < len(a) {
		switch {
		case isDigit(a, i) && isDigit(b, j):
			var x, y int32
			x, i = number(a, i)
			y, j = number(b, j)
			if x != y {
				return int(x) - int(y)
			}
		case isDigit(a, i):
			return 1
		case isDigit(b, j):
			return -1
		case j >= len(b):
			return 1
		case a[i] != b[j]:
			return int(a[i]) - int(b[j])
		default:
			i, j = i+1, j+1
		}
	}
	if j < len(b) {
		return -1
	}
	return 0
}

// Bytes returns the cache in its file format.
func (c *Cache) Bytes() []byte {
	var table stringTable
	table.start = newHeader + newEntry*len(c.Libraries)
	file := make([]byte, newHeader, table.start)
	copy(file, newMagic)
	order.PutUint32(file[20:], uint32(len(c.Libraries)))
	file[28] = littleEnd
	for _, library := range c.Libraries {
		file = order.AppendUint32(file, library.Flags)
		file = order.AppendUint32(file, table.add(library.Name))
		file = order.AppendUint32(file, table.add(library.Path))
		file = order.AppendUint32(file, library.OSVersion)
		file = order.AppendUint64(file, library.HWCap)
	}
	var hwcaps []byte
	for _, name := range c.HWCaps {
		hwcaps = order.AppendUint32(hwcaps, table.add(name))
	}
	order.PutUint32(file[24:], uint32(len(table.text)))
	file = append(file, table.text...)
	for len(file)%4 != 0 {
		file = append(file, 0)
	}
	order.PutUint32(file[32:], uint32(len(file)))
	return append(file, extensions(len(file), hwcaps)...)
}

// extensions returns the directory of extensions and their content, for an offset in the file.
func extensions(at int, hwcaps []byte) []byte {
	type extension struct {
		tag     uint32
		content []byte
	}
	all := []extension{{tagMaker, []byte(generator)}}
	if len(hwcaps) > 0 {
		all = []extension{{tagHWCaps, hwcaps}, all[0]} // first, because its content is aligned
	}
	at += 8 + extEntry*len(all)
	directory := order.AppendUint32(order.AppendUint32(nil, extMagic), uint32(len(all)))
	var contents []byte
	for _, e := range all {
		for _, word := range []uint32{e.tag, 0, uint32(at + len(contents)), uint32(len(e.content))} {
			directory = order.AppendUint32(directory, word)
		}
		contents = append(contents, e.content...)
	}
	return append(directory, contents...)
}

// stringTable contains the strings of a file, each once and null-terminated.
type stringTable struct {
	start int // the table's offset in the file
	text  []byte
	known map[string]uint32
}

func (t *stringTable) add(s string) uint32 {
	if at, ok := t.known[s]; ok {
		return at
	}
	if t.known == nil {
		t.known = make(map[string]uint32)
	}
	at := uint32(t.start + len(t.text))
	t.text = append(append(t.text, s...), 0)
	t.known[s] = at
	return at
}
