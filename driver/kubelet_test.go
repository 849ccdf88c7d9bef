package driver

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"chandler.dev/discovery"
)

func dial(t testing.TB, socket string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// serve runs a new driver with the library's helper in the kubelet directory of earlier calls. It
// returns connections to the registration socket and to the socket for calls, and a function that
// stops the driver.
func (b *bench) serve(client kubernetes.Interface) (registration, node *grpc.ClientConn, stop func()) {
	b.t.Helper()
	b.config.KubeClient = client
	b.config.PodUID = "pod-uid"
	d := b.start()
	opened := make(chan struct{})
	go func() { b.open(); close(opened) }()
	b.Driver = d
	ctx, cancel := context.WithCancel(b.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			b.t.Errorf("Run: %v", err)
		}
		if b.active == nil {
			<-opened // the ledger writes files until then
		}
	})
	b.t.Cleanup(stop)
	registry := filepath.Join(b.config.KubeletRoot, "plugins_registry", "chandler.dev-pod-uid-reg.sock")
	eventually(b.t, "the registration socket", func() bool { return exists(registry) })
	registration = dial(b.t, registry)
	// The socket exists a moment before the helper listens on it.
	info, err := registerapi.NewRegistrationClient(registration).GetInfo(ctx, &registerapi.InfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		b.t.Fatal(err)
	}
	if info.Name != "chandler.dev" {
		b.t.Errorf("registers as %s", info.Name)
	}
	return registration, dial(b.t, info.Endpoint), stop
}

// dryRuns makes a fake client answer dry runs like an API server that keeps every field. Otherwise
// the fake client would store the objects of dry runs.
func dryRuns(client *fake.Clientset) {
	client.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		create := action.(clienttesting.CreateActionImpl)
		return len(create.CreateOptions.DryRun) > 0, create.Object, nil
	})
}

// TestThroughTheHelper acts as the kubelet: it registers the driver, and prepares and unprepares a
// claim over real sockets.
func TestThroughTheHelper(t *testing.T) {
	c := claim("c", "a")
	b := newBench(t)
	var timed stages
	b.config.Observe = timed.add
	spans := tracetest.NewSpanRecorder()
	b.config.Tracer = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("test")
	client := fake.NewClientset(c, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", UID: "node-uid"}})
	dryRuns(client)
	registry, conn, _ := b.serve(client)
	b.offers(gpu("a", 1))
	ctx := t.Context()
	registration := registerapi.NewRegistrationClient(registry)
	for answer, registered := range map[Registration]bool{Refused: false, Accepted: true} {
		// A refusal is also an error of the library.
		registration.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: registered})
		if got := b.Registration(); got != answer {
			t.Errorf("registration is %q, want %q", got, answer)
		}
	}

	node := drapb.NewDRAPluginClient(conn)
	claims := []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}
	prepared, err := node.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: claims})
	if err != nil {
		t.Fatal(err)
	}
	answer := prepared.Claims[string(c.UID)]
	if answer.GetError() != "" || len(answer.Devices) != 1 || answer.Devices[0].CdiDeviceIds[0] != "chandler.dev/claim=uid-c-0-a" {
		t.Errorf("prepared: %v", answer)
	}
	unprepared, err := node.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: claims})
	if err != nil || unprepared.Claims[string(c.UID)].GetError() != "" {
		t.Errorf("unprepared: %v, %v", unprepared, err)
	}
	if exists(b.recordFile(c)) || exists(b.specFile(c)) {
		t.Error("something is left of the claim")
	}
	if _, err := node.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{}); err != nil { // a probe
		t.Error(err)
	}
	expectSpans(t, spans,
		"prepare / read claims from the API server",
		"prepare / claim / wait for another call", "prepare / claim / look up and verify devices", "prepare / claim / write record",
		"prepare / claim / write CDI spec and files", "prepare / claim", "prepare",
		"unprepare / claim / remove CDI spec, files and record", "unprepare / claim", "unprepare",
	)
	timed.expect(t, "prepare read", "prepare claim", "prepare call", "unprepare claim", "unprepare call")
	eventually(t, "a ResourceSlice", func() bool {
		list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
		return err == nil && len(list.Items) == 1 && len(list.Items[0].Spec.Devices) == 1 &&
			list.Items[0].Spec.Driver == discovery.Domain && list.Items[0].Spec.Pool.Name == "node"
	})
}

// expectSpans checks the recorded spans, in the order of their ends, each with its parents.
func expectSpans(t *testing.T, recorder *tracetest.SpanRecorder, want ...string) {
	t.Helper()
	byID := make(map[trace.SpanID]sdktrace.ReadOnlySpan)
	for _, s := range recorder.Ended() {
		byID[s.SpanContext().SpanID()] = s
	}
	var got []string
	for _, s := range recorder.Ended() {
		line := s.Name()
		for up := byID[s.Parent().SpanID()]; up != nil; up = byID[up.Parent().SpanID()] {
			line = up.Name() + " / " + line
		}
		got = append(got, line)
	}
	if !slices.Equal(got, want) {
		t.Errorf("spans %q, want %q", got, want)
	}
}

// stages records the stages of calls in the order of their ends.
type stages struct {
	mu  sync.Mutex
	all []string
}

func (s *stages) add(operation, stage string, took time.Duration, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if took <= 0 || err != nil {
		stage += fmt.Sprintf(" in %s: %v", took, err)
	}
	s.all = append(s.all, operation+" "+stage)
}

func (s *stages) expect(t *testing.T, want ...string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(s.all, want) {
		t.Errorf("stages %q, want %q", s.all, want)
	}
}

// TestHealthStreams acts as kubelets that support one version of the health service. The driver
// offers each version, and reports the same health on each.
func TestHealthStreams(t *testing.T) {
	b := newBench(t)
	registry, conn, _ := b.serve(fake.NewClientset())
	sick := gpu("a", 1)
	sick.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "too hot", Effect: resourceapi.DeviceTaintEffectNoSchedule}
	b.offers(sick)
	ctx := t.Context()
	info, err := registerapi.NewRegistrationClient(registry).GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, service := range []string{healthv1.DRAResourceHealthService, healthv1alpha1.DRAResourceHealthService} {
		if !slices.Contains(info.SupportedVersions, service) {
			t.Errorf("the kubelet is offered %v, not %s", info.SupportedVersions, service)
		}
	}
	const want = "node/a UNHEALTHY too hot"
	stream, err := healthv1.NewDRAResourceHealthClient(conn).NodeWatchResources(ctx, &healthv1.NodeWatchResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	report, err := stream.Recv()
	if err != nil || len(report.Devices) != 1 {
		t.Fatalf("v1: %v, %v", report, err)
	}
	d := report.Devices[0]
	if got := fmt.Sprintf("%s/%s %s %s", d.Device.PoolName, d.Device.DeviceName, d.Health, d.Message); got != want {
		t.Errorf("v1: got %s, want %s", got, want)
	}
	older, err := healthv1alpha1.NewDRAResourceHealthClient(conn).NodeWatchResources(ctx, &healthv1alpha1.NodeWatchResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	same, err := older.Recv()
	if err != nil || len(same.Devices) != 1 {
		t.Fatalf("v1alpha1: %v, %v", same, err)
	}
	e := same.Devices[0]
	if got := fmt.Sprintf("%s/%s %s %s", e.Device.PoolName, e.Device.DeviceName, e.Health, e.Message); got != want {
		t.Errorf("v1alpha1: got %s, want %s", got, want)
	}
}

// The library does not serialize the kubelet's calls. A call that hangs blocks only its own claim.
func TestCallsAtTheSameTime(t *testing.T) {
	b := newBench(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	b.config.Configure = func(d discovery.Device, _ discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
		if d.Name == "a" {
			close(entered)
			<-leave
		}
		return d, nil, nil
	}
	slow, quick := claim("slow", "a"), claim("quick", "b")
	_, conn, _ := b.serve(fake.NewClientset(slow, quick))
	b.offers(gpu("a", 1), gpu("b", 2))
	prepare := func(ctx context.Context, c *resourceapi.ResourceClaim) error {
		response, err := drapb.NewDRAPluginClient(conn).NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{
			Claims: []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}})
		if err == nil && response.Claims[string(c.UID)].GetError() != "" {
			err = errors.New(response.Claims[string(c.UID)].GetError())
		}
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- prepare(t.Context(), slow) }()
	<-entered
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := prepare(ctx, quick); err != nil {
		t.Errorf("while another call hangs: %v", err)
	}
	close(leave)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("there is no %s", what)
		}
	}
}
