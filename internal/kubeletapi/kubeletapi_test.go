package kubeletapi_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/internal/kubeletapi"
	"chandler.dev/legacy/kubelettest"
)

// An invalid response leads to an error that names the step and the socket, and distinguishes
// a kubelet without the API.
func TestListPodsOfWhatIsNoKubelet(t *testing.T) {
	for name, test := range map[string]struct {
		make   func(t *testing.T, socket string)
		absent bool
		want   string
	}{
		"no socket":          {func(*testing.T, string) {}, true, "no such file"},
		"a socket before":    {func(t *testing.T, socket string) { kubelettest.ServeOdd(t, socket, kubelettest.Gone) }, false, "connection refused"},
		"no socket at all":   {func(t *testing.T, socket string) { mustWrite(t, socket) }, false, "connection refused"},
		"garbage":            {func(t *testing.T, socket string) { kubelettest.ServeOdd(t, socket, kubelettest.Garbage) }, false, "Unavailable"},
		"it hangs up":        {func(t *testing.T, socket string) { kubelettest.ServeOdd(t, socket, kubelettest.HangsUp) }, false, "Unavailable"},
		"it is silent":       {func(t *testing.T, socket string) { kubelettest.ServeOdd(t, socket, kubelettest.Silent) }, false, "DeadlineExceeded"},
		"without that API":   {func(t *testing.T, socket string) { kubelettest.Serve(t, grpc.NewServer(), socket) }, true, "Unimplemented"},
		"with another of it": {func(t *testing.T, socket string) { serveFailing(t, socket) }, false, "not now"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			socket := filepath.Join(shortDir(t), "s")
			test.make(t, socket)
			limit := kubelettest.Patience
			if test.want == "DeadlineExceeded" {
				limit = time.Second
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			said, err := kubeletapi.ListPods(ctx, socket)
			if err == nil {
				t.Fatalf("it said %v", said)
			}
			if errors.Is(err, kubeletapi.ErrAbsent) != test.absent {
				t.Errorf("absent: %t; want %t: %v", !test.absent, test.absent, err)
			}
			for _, want := range []string{"read PodResources", socket, test.want} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is not in: %v", want, err)
				}
			}
		})
	}
}

func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "k") // the path of t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func mustWrite(t *testing.T, file string) {
	t.Helper()
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

// failing responds with an error.
type failing struct {
	podresourcesapi.UnimplementedPodResourcesListerServer
}

func (failing) List(context.Context, *podresourcesapi.ListPodResourcesRequest) (*podresourcesapi.ListPodResourcesResponse, error) {
	return nil, errors.New("not now")
}

func serveFailing(t *testing.T, socket string) {
	t.Helper()
	server := grpc.NewServer()
	t.Cleanup(server.Stop)
	podresourcesapi.RegisterPodResourcesListerServer(server, failing{})
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.Serve(listener) }()
}
