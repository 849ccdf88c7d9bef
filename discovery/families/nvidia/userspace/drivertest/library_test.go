package drivertest

import (
	"bytes"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The library's soname is readable by debug/elf, and the real loader can call its function.
func TestLibrary(t *testing.T) {
	data, err := BuildLibrary("libcuda.so.1")
	if err != nil {
		t.Skip(err)
	}
	file, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	if names, err := file.DynString(elf.DT_SONAME); err != nil || len(names) != 1 || names[0] != "libcuda.so.1" {
		t.Errorf("names %q, error %v", names, err)
	}
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("there is no C compiler: ", err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "libcuda.so.1"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	cc := exec.Command("cc", "-x", "c", "-", "-o", filepath.Join(dir, "call"), "-ldl")
	cc.Stdin = strings.NewReader(`
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	int (*init)(unsigned) = library ? dlsym(library, "cuInit") : 0;
	if (init)
		printf("%d", init(0));
	else
		puts(dlerror());
	return 0;
}`)
	if said, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	call := exec.Command(filepath.Join(dir, "call"))
	call.Env = []string{"LD_LIBRARY_PATH=" + dir}
	if said, err := call.CombinedOutput(); err != nil || string(said) != "0" {
		t.Errorf("error %v, it said %q", err, said)
	}
}
