package hook

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"chandler.dev/cdi/hook"
)

func newContainer(t *testing.T) (*hook.Container, string) {
	t.Helper()
	root := t.TempDir()
	c, err := hook.In(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, root
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can make device nodes and mounts")
	}
}

func TestApplicationProfile(t *testing.T) {
	needRoot(t)
	c, root := newContainer(t)
	if err := updateApplicationProfile.Run(c, nil); err != nil {
		t.Fatal("without /dev: ", err)
	}
	if err := os.Mkdir(root+"/dev", 0o755); err != nil {
		t.Fatal(err)
	}
	file := root + "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
	if err := updateApplicationProfile.Run(c, nil); err != nil {
		t.Fatal("without GPUs: ", err)
	}
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("a container without GPUs gets a profile: %v", err)
	}
	for name, minor := range map[string]uint32{"nvidia0": 0, "nvidia5": 5, "nvidia63": 63, "nvidia64": 64, "nvidiactl": 255, "nvidia-uvm": 1} {
		if err := unix.Mknod(root+"/dev/"+name, unix.S_IFCHR|0o600, int(unix.Mkdev(195, minor))); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string]string{"nvidia7": "no device", "nvidia8": ""} {
		if err := os.WriteFile(root+"/dev/"+name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("nvidia5", root+"/dev/nvidia9"); err != nil {
		t.Fatal(err)
	}
	if err := updateApplicationProfile.Run(c, nil); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(file)
	const want = `{"profiles":[{"name":"_container_","settings":["EGLVisibleDGPUDevices",0x8000000000000021]}],` +
		`"rules":[{"pattern":[],"profile":"_container_"}]}`
	if err != nil || string(got) != want {
		t.Errorf("profile %s, %v; want %s", got, err, want)
	}
}

func TestForbid(t *testing.T) {
	for _, test := range []struct {
		params, want string
		changed      bool
	}{
		{"ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 0\n", "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 0\nDeviceFileUID: 0\n", true},
		{"ModifyDeviceFiles: 0\n", "ModifyDeviceFiles: 0\n", false},
		{"DeviceFileUID: 0\n", "DeviceFileUID: 0\n", false},
		{"", "", false},
	} {
		got, changed := forbidNodes([]byte(test.params))
		if string(got) != test.want || changed != test.changed {
			t.Errorf("forbid(%q) = %q, %t; want %q, %t", test.params, got, changed, test.want, test.changed)
		}
	}
}

// The hook covers the kernel's file with a file that no process in the container can change, even
// if the image is read-only and has no /run. The covered file belongs to procfs, like the driver's,
// in a mount namespace of the test.
func TestCoverParams(t *testing.T) {
	needRoot(t)
	c, root := newContainer(t)
	if err := coverParams(c, paramsFile); err != nil {
		t.Fatal("without the driver: ", err)
	}
	fake := root + paramsFile
	if err := errors.Join(os.MkdirAll(filepath.Dir(fake), 0o755), os.WriteFile(fake, []byte("ModifyDeviceFiles: 1\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := coverParams(c, paramsFile); err == nil || !strings.Contains(err.Error(), "not of the kernel") {
		t.Fatalf("a file of the image is covered: %v", err)
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine because it is never unlocked
		done <- coverInNamespace(root)
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// coverInNamespace covers a file of procfs in a new mount namespace.
func coverInNamespace(root string) error {
	err := errors.Join(
		unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS),
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		os.RemoveAll(root+"/proc"), os.Mkdir(root+"/proc", 0o755),
		unix.Mount(root, root, "", unix.MS_BIND, ""),
		unix.Mount("", root, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""),
		unix.Mount("proc", root+"/proc", "proc", 0, ""),
	)
	if err != nil {
		return err
	}
	c, err := hook.In(root) // opened only now, because a container belongs to one namespace
	if err != nil {
		return err
	}
	defer c.Close()
	const file = "/proc/sys/kernel/hostname" // a file of one line
	before, err := os.ReadFile(root + file)
	if err != nil {
		return err
	}
	if err := c.CoverFile(file, []byte("covered\n")); err != nil {
		return err
	}
	after, err := os.ReadFile(root + file)
	if err != nil {
		return err
	}
	if string(after) != "covered\n" || string(before) == string(after) {
		return errors.New("the file is not covered: " + string(after))
	}
	if err := os.WriteFile(root+file, []byte("changed"), 0o600); !errors.Is(err, unix.EROFS) {
		return errors.New("the cover can be written")
	}
	if _, err := os.Stat(root + "/proc/sys/kernel/ostype"); err != nil {
		return errors.New("more is covered than the file: " + err.Error())
	}
	return nil
}

func TestMadeFor(t *testing.T) {
	note := &compatNote{CUDA: "12.9", Driver: []uint{535, 550, 570, 575}}
	for _, test := range []struct {
		note                      *compatNote
		own, hostDriver, hostCUDA string
		want                      bool
	}{
		{note, "575.57.08", "570.124.06", "12.8", true},
		{note, "575.57.08", "570.124.06", "", true},
		{note, "575.57.08", "560.35", "12.6", false},    // the note does not list that driver
		{note, "575.57.08", "575.57.08", "12.9", false}, // the host's driver has the same version
		{note, "575.57.08", "580.1", "13.0", false},
		{note, "575.57.08", "", "12.8", true},
		{note, "575.57.08", "", "12.9", false},
		{note, "575.57.08", "", "", false},
		{nil, "575.57.08", "570.124.06", "", true},
		{nil, "575.57.08", "575.1", "", false},
		{nil, "575.57.08", "570.124.06", "12.8", false}, // comparing CUDA versions requires a note
		{nil, "1.1", "nonsense", "", false},
	} {
		if got := madeFor(test.note, test.own, test.hostDriver, test.hostCUDA); got != test.want {
			t.Errorf("madeFor(%v, %q, %q, %q) = %t", test.note, test.own, test.hostDriver, test.hostCUDA, got)
		}
	}
}

// note returns a note in its binary form.
func note(name, content string) []byte {
	data := binary.LittleEndian.AppendUint32(nil, uint32(len(name)+1))
	data = binary.LittleEndian.AppendUint32(data, uint32(len(content)+1))
	data = binary.LittleEndian.AppendUint32(data, 1)
	data = append(append(data, name...), 0)
	for len(data)%4 != 0 {
		data = append(data, 0)
	}
	return append(append(data, content...), 0)
}

const content = `{"Format":1,"CUDA Version":"12.9","Driver":[535,550,570,575],"Device":[7,8]}`

func TestCUDACompat(t *testing.T) {
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("there is no C compiler: ", err)
	}
	c, root := newContainer(t)
	run := func(driver string) string {
		t.Helper()
		if err := enableCUDACompat.Run(c, map[string][]string{"host-driver-version": {driver}}); err != nil {
			t.Fatal(err)
		}
		conf, err := filepath.Glob(root + "/etc/ld.so.conf.d/*")
		if err != nil || len(conf) > 1 {
			t.Fatalf("%v, %v", conf, err)
		}
		if len(conf) == 0 {
			return ""
		}
		data, err := os.ReadFile(conf[0])
		if err := errors.Join(err, os.Remove(conf[0])); err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	if got := run("570.124.06"); got != "" {
		t.Fatalf("an image without such libraries prefers %q", got)
	}
	// As in NVIDIA images, links from the image's root lead to the directory.
	dir := root + "/usr/local/cuda-12.9/compat"
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.Symlink("/usr/local/cuda-12.9", root+"/usr/local/cuda")); err != nil {
		t.Fatal(err)
	}
	library := dir + "/libcuda.so.575.57.08"
	source := `__asm__(".pushsection .note.cuda.fwd_compatibility,\"\",@note\n.byte ` + joined(note(noteName, content)) + `\n.popsection\n");`
	cmd := exec.CommandContext(t.Context(), "cc", "-x", "c", "-", "-shared", "-o", library)
	cmd.Stdin = strings.NewReader(source)
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	for driver, want := range map[string]string{"570.124.06": "/usr/local/cuda/compat\n", "560.35.03": "", "575.57.08": "", "": ""} {
		if got := run(driver); got != want {
			t.Errorf("driver %q: prefers %q; want %q", driver, got, want)
		}
	}
	if err := os.WriteFile(dir+"/libcuda.so.580.1", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := run("570.124.06"); got != "" {
		t.Errorf("of two libraries one is taken: %q", got)
	}
}

// joined returns bytes in assembler syntax.
func joined(data []byte) string {
	numbers := make([]string, len(data))
	for i, b := range data {
		numbers[i] = strconv.Itoa(int(b))
	}
	return strings.Join(numbers, ",")
}

func FuzzNote(f *testing.F) {
	f.Add(note(noteName, content), uint64(4))
	f.Add(note(noteName, "{"), uint64(8))
	f.Fuzz(func(_ *testing.T, data []byte, align uint64) { _, _ = parseNote(data, binary.LittleEndian, align) })
}

func FuzzLibrary(f *testing.F) {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		f.Fatal(err)
	}
	defer self.Close()
	head := make([]byte, 4096)
	if _, err := self.Read(head); err != nil {
		f.Fatal(err)
	}
	if _, err := elf.NewFile(self); err != nil {
		f.Fatal(err)
	}
	f.Add(head)
	f.Fuzz(func(_ *testing.T, data []byte) { noteOf(bytes.NewReader(data)) })
}
