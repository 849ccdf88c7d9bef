package legacy

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/internal/traces"
	"chandler.dev/legacy/list"
)

// Observer receives the duration and the error of a kubelet call, or of sending a list to the
// kubelet. It may be called from several goroutines at once.
type Observer func(operation Operation, took time.Duration, err error)

// Operation is the kind of an observed operation.
type Operation string

// The operations.
const (
	OperationAllocate Operation = "allocate"  // a call of Allocate
	OperationPrefer   Operation = "prefer"    // a call of GetPreferredAllocation
	OperationList     Operation = "list-sent" // a list sent to a call of ListAndWatch
)

// ErrUnavailable is the error of calls for an ID that is not in the list of the resource or cannot
// be allocated.
var ErrUnavailable = errors.New("unavailable")

// unavailableError is an [ErrUnavailable] with its own text.
type unavailableError struct{ error }

// Is implements the interface of package errors.
func (unavailableError) Is(target error) bool { return target == ErrUnavailable }

// server is the plugin of one resource. All streams read the same list, which is replaced and never
// modified.
type server struct {
	pluginapi.UnimplementedDevicePluginServer

	resource string
	grace    time.Duration
	allocate allocator
	observe  Observer
	tracer   trace.Tracer // nil for none

	mu         sync.Mutex
	list       *list.List
	changed    chan struct{}   // closed when the list is replaced
	streams    map[*stream]int // the version that each stream has sent
	published  time.Time       // when the version of the list was published
	goneSentAt time.Time       // since when all streams have sent the IDs marked as gone, zero if not yet
	inFlight   int             // running calls of Allocate
	idleSince  time.Time       // since when there is no such call
}

// stream is a call of ListAndWatch.
type stream struct{ grpc.ServerStream }

// allocator answers the requests of containers for IDs of a list.
type allocator func(ctx context.Context, l *list.List, resource string, requests [][]string) ([]*pluginapi.ContainerAllocateResponse, error)

func newServer(resource string, grace time.Duration, allocate allocator, observe Observer) *server {
	return &server{
		resource:  resource,
		grace:     grace,
		allocate:  allocate,
		observe:   observe,
		changed:   make(chan struct{}),
		streams:   make(map[*stream]int),
		idleSince: time.Now(),
	}
}

// publish replaces the list.
func (s *server) publish(l *list.List) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.list
	s.list = l
	if before == nil || before.Version() != l.Version() {
		s.published = time.Now()
		close(s.changed)
		s.changed = make(chan struct{})
	}
	if before == nil || before.MarkedVersion() != l.MarkedVersion() {
		s.goneSentAt = time.Time{}
		s.tell()
	}
}

// tell stores when all streams have sent the IDs marked as gone.
func (s *server) tell() {
	if s.list != nil && s.goneSentAt.IsZero() && s.hasSent(s.list.MarkedVersion()) {
		s.goneSentAt = time.Now()
	}
}

// current returns the list, and a channel that is closed when the list is replaced.
func (s *server) current() (*list.List, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.list, s.changed
}

// kubeletBelief returns what the kubelet may still assume. The argument is the start of the last
// whole answer of PodResources.
func (s *server) kubeletBelief(heard time.Time) list.Belief {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := list.Belief{ListedAt: heard}
	if s.list != nil && s.hasSent(s.list.MarkedVersion()) {
		b.GoneSentAt = s.goneSentAt
	}
	if s.inFlight == 0 {
		b.IdleSince = s.idleSince
	}
	return b
}

// done reports whether the resource can end, because the kubelet has received its empty list.
func (s *server) done(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.list == nil || !s.list.Empty() || s.inFlight > 0 || !s.hasSent(s.list.Version()) {
		return false
	}
	return len(s.streams) > 0 || now.Sub(s.published) >= s.grace
}

// hasSent reports whether all streams have sent the version or a later one.
func (s *server) hasSent(version int) bool {
	for _, sent := range s.streams {
		if sent < version {
			return false
		}
	}
	return true
}

// begin marks the start of a call of Allocate, and the returned function its end.
func (s *server) begin() (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inFlight++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.inFlight--
		s.idleSince = time.Now()
	}
}

// GetDevicePluginOptions returns options without PreStartContainer. With this option, the kubelet
// would fail every container of the resource while the plugin is not running
// (pkg/kubelet/cm/devicemanager/manager.go, callPreStartContainerIfNeeded).
func (s *server) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// ListAndWatch sends the list at once and after each replacement.
func (s *server) ListAndWatch(_ *pluginapi.Empty, to grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	own := &stream{to}
	s.enterStream(own)
	defer s.exit(own)
	for sent := -1; ; {
		l, changed := s.current()
		if l.Version() != sent {
			began := time.Now()
			err := to.Send(&pluginapi.ListAndWatchResponse{Devices: l.Devices()})
			s.observe(OperationList, time.Since(began), err)
			if err != nil {
				return err
			}
			sent = l.Version()
			s.noteVersion(own, sent)
		}
		select {
		case <-changed:
		case <-to.Context().Done():
			return nil
		}
	}
}

func (s *server) enterStream(own *stream) { s.noteVersion(own, 0) }

func (s *server) noteVersion(own *stream, version int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.streams[own] = version
	s.tell()
}

func (s *server) exit(own *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.streams, own)
	s.tell()
}

// Allocate returns what each container needs for its IDs.
func (s *server) Allocate(ctx context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	defer s.begin()()
	began := time.Now()
	requests := make([][]string, len(r.ContainerRequests))
	for i, container := range r.ContainerRequests {
		requests[i] = container.DevicesIds
	}
	// The list is read after the call is counted, so that no ID leaves the list during the call.
	l, _ := s.current()
	ctx, end := traces.Call(ctx, s.tracer, "allocate", attribute.String("chandler.resource", s.resource))
	responses, err := s.allocate(ctx, l, s.resource, requests)
	end(err)
	s.observe(OperationAllocate, time.Since(began), err)
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, fmt.Errorf("allocate %w", err).Error())
	}
	return &pluginapi.AllocateResponse{ContainerResponses: responses}, nil
}

// GetPreferredAllocation returns the best IDs for each container.
func (s *server) GetPreferredAllocation(_ context.Context, r *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	began := time.Now()
	l, _ := s.current()
	response := &pluginapi.PreferredAllocationResponse{}
	var errs []error
	for _, container := range r.ContainerRequests {
		ids, err := l.PreferIDs(container.AvailableDeviceIDs, container.MustIncludeDeviceIDs, int(container.AllocationSize))
		errs = append(errs, err)
		response.ContainerResponses = append(response.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	err := errors.Join(errs...)
	s.observe(OperationPrefer, time.Since(began), err)
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, fmt.Errorf("%s: %w", s.resource, err).Error())
	}
	return response, nil
}

// PreStartContainer does nothing.
func (s *server) PreStartContainer(context.Context, *pluginapi.PreStartContainerRequest) (*pluginapi.PreStartContainerResponse, error) {
	return &pluginapi.PreStartContainerResponse{}, nil
}
