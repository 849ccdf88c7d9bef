package agent

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// An agent that offers devices by DRA warns once if the container runtime does not read CDI specs,
// and logs that the answer is not known.
func TestWarnsOfTheRuntime(t *testing.T) {
	for name, test := range map[string]struct {
		mode discovery.Mode
		on   bool
		err  error
		want string // in the log
	}{
		"off":               {discovery.ModeDRA, false, nil, "Warning: the container runtime does not read CDI specs"},
		"not known":         {discovery.ModeDRA, false, errors.New("why"), "It is not known whether the container runtime reads CDI specs"},
		"on":                {discovery.ModeDRA, true, nil, ""},
		"device plugin API": {discovery.ModeDevicePlugin, false, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				var mu sync.Mutex
				var log []string
				ctx := klog.NewContext(t.Context(), funcr.New(func(_, args string) {
					mu.Lock()
					defer mu.Unlock()
					if strings.Contains(args, "CDI specs") {
						log = append(log, args)
					}
				}, funcr.Options{}))
				node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}
				node.Status.NodeInfo.ContainerRuntimeVersion = "containerd://1.7.2"
				config := n.config(&rules.Rules{Mode: test.mode})
				config.CDIEnabled = func(runtime string) (bool, error) {
					if runtime != "containerd://1.7.2" {
						t.Errorf("the runtime is %s", runtime)
					}
					return test.on, test.err
				}
				ctx, cancel := context.WithCancel(ctx)
				ended := make(chan error, 1)
				go func() { ended <- Run(ctx, config) }()
				time.Sleep(time.Minute)
				if _, err := n.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
					t.Error(err)
				}
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				mu.Lock()
				got := strings.Join(log, " ")
				if count := len(log); test.want == "" && count > 0 || test.want != "" && (count != 1 || !strings.Contains(got, test.want)) {
					t.Errorf("logged %q, want %q", log, test.want)
				}
				mu.Unlock()
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}
