package machine

import (
	"slices"
	"testing"
	"testing/fstest"
)

func TestHierarchies(t *testing.T) {
	type found struct{ mount, home, options string }
	tests := map[string]struct {
		cgroup, mountinfo string
		want              []found
	}{
		"v2": {
			cgroup: "0::/user.slice/session-1.scope\n",
			mountinfo: "24 1 8:1 / / rw - ext4 /dev/sda1 rw\n" +
				"35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
			want: []found{{"/sys/fs/cgroup", "/sys/fs/cgroup/user.slice/session-1.scope", ""}},
		},
		"v1 and v2": {
			cgroup: "3:name=systemd:/\n2:cpu,cpuacct:/a\n1:net_cls:/\n0::/\n",
			mountinfo: "36 25 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n" +
				"37 25 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n" +
				"38 25 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
			want: []found{
				{"/sys/fs/cgroup/systemd", "/sys/fs/cgroup/systemd", "none,name=systemd"},
				{"/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/cpu,cpuacct/a", "cpu,cpuacct"},
				{"/sys/fs/cgroup/unified", "/sys/fs/cgroup/unified", ""},
			},
		},
		"mounted from a container's cgroup": {
			cgroup:    "0::/docker/c1/leaf\n",
			mountinfo: "35 24 0:30 /docker/c1 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
			want:      []found{{"/sys/fs/cgroup", "/sys/fs/cgroup/leaf", ""}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			host := fstest.MapFS{
				"proc/self/cgroup":    {Data: []byte(test.cgroup)},
				"proc/self/mountinfo": {Data: []byte(test.mountinfo)},
			}
			hierarchies, err := hierarchies(host)
			if err != nil {
				t.Fatal(err)
			}
			var got []found
			for _, h := range hierarchies {
				got = append(got, found{h.mount, h.home(), h.mountOptions()})
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("got  %q\nwant %q", got, test.want)
			}
		})
	}
}
