package hook

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The cache of this machine's ldconfig is read and written without loss.
func TestCacheOfThisMachine(t *testing.T) {
	data, err := os.ReadFile("/etc/ld.so.cache")
	if err != nil {
		t.Skip("this machine has no loader's cache: ", err)
	}
	cache, err := ParseCache(data)
	if err != nil {
		t.Fatal(err)
	}
	if len(cache.Libraries) == 0 {
		t.Fatal("no library is in the cache")
	}
	again, err := ParseCache(cache.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	again.Generator = cache.Generator
	if diff := cmp.Diff(cache, again); diff != "" {
		t.Error("written and read again, the cache is another (-before +after):\n", diff)
	}
	// The order is ldconfig's, which checks compareNames.
	inOrder := slices.IsSortedFunc(cache.Libraries, func(a, b Library) int { return compareNames(b.Name, a.Name) })
	if !inOrder {
		t.Error("the order of names is not ldconfig's")
	}
}

var printed = regexp.MustCompile(`(?m)^\t(\S+) \((.*)\) => (\S+)$`)

// This machine's ldconfig reads our cache, with the same libraries and the added ones.
func TestLdconfigReadsOurCache(t *testing.T) {
	ldconfig, err := exec.LookPath("ldconfig")
	if err != nil {
		t.Skip("this machine has no ldconfig: ", err)
	}
	data, err := os.ReadFile("/etc/ld.so.cache")
	if err != nil {
		t.Skip("this machine has no loader's cache: ", err)
	}
	list := func(file string) (lines []string) {
		out, err := exec.CommandContext(t.Context(), ldconfig, "-p", "-C", file).CombinedOutput()
		if err != nil {
			t.Fatalf("ldconfig -p: %v\n%s", err, out)
		}
		for _, m := range printed.FindAllStringSubmatch(string(out), -1) {
			lines = append(lines, strings.Join(m[1:], " "))
		}
		return lines
	}
	before := list("/etc/ld.so.cache")
	cache, err := ParseCache(data)
	if err != nil {
		t.Fatal(err)
	}
	cache.Add(Library{Name: "libcuda.so.1", Path: "/usr/lib64/libcuda.so.1", Flags: kind.flags})
	file := filepath.Join(t.TempDir(), "ld.so.cache")
	if err := os.WriteFile(file, cache.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	after := list(file)
	const added = "libcuda.so.1 libc6,x86-64 /usr/lib64/libcuda.so.1"
	i := slices.IndexFunc(after, func(line string) bool { return strings.HasPrefix(line, "libcuda.so.1 ") })
	if i < 0 || (kind.musl == "x86_64" && after[i] != added) {
		t.Fatalf("ldconfig does not list the library that was added first: %q", after)
	}
	if diff := cmp.Diff(before, slices.Delete(slices.Clone(after), i, i+1)); diff != "" {
		t.Error("other libraries changed (-before +after):\n", diff)
	}
}

// oldFormat returns a cache in the format before glibc 2.32: an old table, then a new one.
func oldFormat(c *Cache) []byte {
	file := make([]byte, oldHeader, 256)
	copy(file, oldMagic)
	order.PutUint32(file[12:], 3)
	file = append(file, make([]byte, 3*oldEntry)...)
	for len(file)%8 != 0 {
		file = append(file, 0)
	}
	table := c.Bytes()
	extensions := order.Uint32(table[32:])
	clear(table[28:36])
	return append(file, table[:extensions]...)
}

func TestCacheOfOldFormat(t *testing.T) {
	want := &Cache{Libraries: []Library{
		{Name: "libz.so.1", Path: "/lib64/libz.so.1", Flags: 0x303},
		{Name: "libc.so.6", Path: "/lib64/libc.so.6", Flags: 0x303, OSVersion: 0x30200},
	}}
	got, err := ParseCache(oldFormat(want))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error("(-want +got):\n", diff)
	}
}

func TestCacheWithProcessors(t *testing.T) {
	want := &Cache{
		Libraries: []Library{
			{Name: "libm.so.6", Path: "/usr/lib64/glibc-hwcaps/x86-64-v3/libm.so.6", Flags: 0x303, HWCap: 1<<62 | 2<<32 | 1},
			{Name: "libm.so.6", Path: "/lib64/libm.so.6", Flags: 0x303},
		},
		HWCaps:    []string{"x86-64-v2", "x86-64-v3"},
		Generator: generator,
	}
	got, err := ParseCache(want.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error("(-want +got):\n", diff)
	}
}

func TestAdd(t *testing.T) {
	of := func(name, path string) Library { return Library{Name: name, Path: path, Flags: kind.flags} }
	cache := &Cache{Libraries: []Library{
		of("libz.so.1", "/lib/libz.so.1"), of("libcuda.so.1", "/lib/libcuda.so.1"), of("liba.so.10", "/lib/liba.so.10"), of("liba.so.9", "/lib/liba.so.9"),
	}}
	cache.Add(of("libcuda.so.1", "/compat/libcuda.so.1"), of("libcuda.so.1", "/usr/lib64/libcuda.so.1"),
		of("libz.so.1", "/lib/libz.so.1"), of("libnvidia-ml.so.1", "/usr/lib64/libnvidia-ml.so.1"))
	want := []Library{
		of("libz.so.1", "/lib/libz.so.1"),
		of("libnvidia-ml.so.1", "/usr/lib64/libnvidia-ml.so.1"),
		of("libcuda.so.1", "/compat/libcuda.so.1"), of("libcuda.so.1", "/usr/lib64/libcuda.so.1"), of("libcuda.so.1", "/lib/libcuda.so.1"),
		of("liba.so.10", "/lib/liba.so.10"), of("liba.so.9", "/lib/liba.so.9"),
	}
	if diff := cmp.Diff(want, cache.Libraries); diff != "" {
		t.Error("(-want +got):\n", diff)
	}
}

func TestDamagedCaches(t *testing.T) {
	whole := (&Cache{Libraries: []Library{{Name: "libz.so.1", Path: "/lib/libz.so.1"}}, HWCaps: []string{"x86-64-v2"}}).Bytes()
	damaged := map[string]func([]byte) []byte{
		"empty":                 func([]byte) []byte { return nil },
		"of another program":    func([]byte) []byte { return bytes.Repeat([]byte("x"), 100) },
		"cut off":               func(b []byte) []byte { return b[:newHeader+10] },
		"too many entries":      func(b []byte) []byte { order.PutUint32(b[20:], 1<<31); return b },
		"of another byte order": func(b []byte) []byte { b[28] = 3; return b },
		"a name outside":        func(b []byte) []byte { order.PutUint32(b[newHeader+4:], 1<<30); return b },
		"extensions outside":    func(b []byte) []byte { order.PutUint32(b[32:], 1<<30); return b },
		"other extensions":      func(b []byte) []byte { order.PutUint32(b[order.Uint32(b[32:]):], 7); return b },
		"an old table too long": func([]byte) []byte { b := make([]byte, 20); copy(b, oldMagic); b[13] = 255; return b },
	}
	for name, damage := range damaged {
		if _, err := ParseCache(damage(bytes.Clone(whole))); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func FuzzParseCache(f *testing.F) {
	whole := &Cache{Libraries: []Library{{Name: "libz.so.1", Path: "/lib/libz.so.1", Flags: 3}}, HWCaps: []string{"x86-64-v2"}}
	f.Add(whole.Bytes())
	f.Add(oldFormat(whole))
	f.Fuzz(func(t *testing.T, data []byte) {
		cache, err := ParseCache(data)
		if err != nil {
			return
		}
		again, err := ParseCache(cache.Bytes())
		if err != nil {
			t.Fatalf("what was read cannot be written: %v", err)
		}
		again.Generator = cache.Generator
		if diff := cmp.Diff(cache, again); diff != "" {
			t.Fatal("written and read again, it is another:\n", diff)
		}
	})
}
