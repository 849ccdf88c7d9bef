package chandler

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"chandler.dev/e2e/cluster"
)

// places are patterns of the files that an agent writes on a node.
var places = []string{
	StateDir, RunDir + "/*", CDIDir + "/*", "/var/lib/kubelet/plugins_registry/*", "/var/lib/kubelet/device-plugins/chandler*",
	HostDir + "/features/*", "/var/run/k8s.cni.cncf.io/devinfo/dp/*", "/etc/kubernetes/node-feature-discovery/features.d/*",
}

// Left returns the files on a node that match places.
func Left(n *cluster.Node) (left []string, err error) {
	root := n.NodePath("/")
	for _, place := range places {
		found, err := filepath.Glob(n.NodePath(place))
		if err != nil {
			return nil, err
		}
		for _, file := range found {
			if _, err := os.Lstat(file); !errors.Is(err, fs.ErrNotExist) {
				left = append(left, "/"+strings.TrimPrefix(strings.TrimPrefix(file, root), "/"))
			}
		}
	}
	return left, nil
}
