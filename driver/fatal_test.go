package driver

import (
	"context"
	"net"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// acceptingClient returns a client of an API server that accepts each slice. The helper of
// [StartHelper] creates slices without a dry run, which [pooltest.KeepingServer] does not permit.
func acceptingClient() *fake.Clientset {
	client := fake.NewClientset()
	client.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		return true, action.(clienttesting.CreateAction).GetObject(), nil
	})
	return client
}

// A driver whose socket fails ends with the reason, and the next driver can release the prepared
// claims.
func TestLostListenerEndsRun(t *testing.T) {
	for socket, test := range map[string]struct {
		listener func(func(context.Context, string) (net.Listener, error)) kubeletplugin.Option
		want     string
	}{
		"registration": {kubeletplugin.RegistrarListener, "registrar gRPC server failed"},
		"calls":        {kubeletplugin.PluginListener, "DRA gRPC server failed"},
	} {
		t.Run(socket, func(t *testing.T) {
			b := newBench(t)
			b.config.KubeClient = acceptingClient()
			d := b.start()
			b.open()
			listening := make(chan net.Listener, 1)
			d.config.StartHelper = func(ctx context.Context, plugin kubeletplugin.DRAPlugin, options ...kubeletplugin.Option) (Helper, error) {
				return StartHelper(ctx, plugin, append(options, test.listener(func(_ context.Context, path string) (net.Listener, error) {
					listener, err := net.Listen("unix", path)
					listening <- listener
					return listener, err
				}))...)
			}
			b.Driver = d
			ended := make(chan error, 1)
			go func() { ended <- d.Run(t.Context()) }()
			b.offers(gpu("a", 1))
			c := claim("c", "a")
			if _, err := b.try(c); err != nil {
				t.Fatal(err)
			}
			(<-listening).Close()
			if err := <-ended; err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("Run: %v; want %q", err, test.want)
			}
			if !exists(b.recordFile(c)) || !exists(b.specFile(c)) {
				t.Error("the claim's record or spec is gone")
			}
			if err := b.restart().tryUnprepare(c); err != nil {
				t.Error(err)
			}
			if exists(b.recordFile(c)) || exists(b.specFile(c)) {
				t.Error("something is left of the claim")
			}
		})
	}
}
