package kubelet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"k8s.io/apimachinery/pkg/types"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/internal/kubeletapi"
)

// deviceManager serves the device plugin API (pkg/kubelet/cm/devicemanager). The lock of the kubelet
// guards its fields.
type deviceManager struct {
	kubelet *Kubelet

	endpoints map[string][]*endpoint // by resource; the last is called
	named     map[string]*endpoint   // by resource: the endpoint with its name, up to 1.36
	healthy   map[string]map[string]bool
	lists     map[string]map[string]bool        // the last list of each resource, even if its plugin is gone
	allocated map[types.UID]map[string][]string // devices by pod and resource: the checkpoint
	nodesOf   map[types.UID]map[string][]string // device nodes in the answers of Allocate, by pod and resource
	pending   map[string]map[string]types.UID   // IDs of Allocate calls in flight
	known     map[string]bool                   // all resources that were ever registered
}

// endpoint is a device plugin with a registration for a resource.
type endpoint struct {
	process  *Process
	resource string
	server   pluginapi.DevicePluginServer

	stream context.Context // context of ListAndWatch; ends when the kubelet drops the endpoint
	drop   context.CancelFunc
	speaks context.Context // also ends when the stream stays open but sends nothing more
	mute   context.CancelFunc
	fails  bool          // the registration is intended to fail
	lost   chan struct{} // closed at the end of the stream
	once   sync.Once
	calls  sync.WaitGroup
	leaves atomic.Bool // the agent has ended, and another agent takes over
}

// endStream ends the stream, from either side.
func (e *endpoint) endStream() {
	e.once.Do(func() {
		e.drop()
		close(e.lost)
	})
}

// stream is the kubelet's end of ListAndWatch.
type stream struct {
	kubelet  *Kubelet
	endpoint *endpoint
}

var _ grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse] = stream{}

func (s stream) Context() context.Context     { return s.endpoint.speaks }
func (s stream) SetHeader(metadata.MD) error  { return nil }
func (s stream) SendHeader(metadata.MD) error { return nil }
func (s stream) SetTrailer(metadata.MD)       {}
func (s stream) SendMsg(any) error            { return errors.New("not a message") }
func (s stream) RecvMsg(any) error            { return errors.New("not a message") }

// Send receives a list. The list replaces all devices of the resource, whichever endpoint sends it
// (pkg/kubelet/cm/devicemanager/manager.go, genericDeviceUpdateCallback).
func (s stream) Send(list *pluginapi.ListAndWatchResponse) error {
	k := s.kubelet
	if s.endpoint.stream.Err() != nil || s.endpoint.process.isDead() {
		return errors.New("transport is closing")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.up {
		return errors.New("transport is closing")
	}
	healthy := make(map[string]bool)
	var sick []string
	for _, d := range list.Devices {
		if d.Health == pluginapi.Healthy {
			healthy[d.ID] = true
		} else {
			sick = append(sick, d.ID)
		}
	}
	k.devices.healthy[s.endpoint.resource] = healthy
	k.devices.noteList(s.endpoint.resource, list)
	k.log("resource %s has devices %v, unhealthy %v", s.endpoint.resource, slices.Sorted(maps.Keys(healthy)), sick)
	return nil
}

// noteList records a list, and the allocated IDs missing from the list.
func (m *deviceManager) noteList(resource string, list *pluginapi.ListAndWatchResponse) {
	listed := make(map[string]bool)
	for _, d := range list.Devices {
		listed[d.ID] = true
	}
	m.lists[resource] = listed
	for _, w := range m.kubelet.workers {
		for _, id := range m.allocated[w.pod.UID][resource] {
			if !listed[id] && m.kubelet.isActive(w.pod.UID) && m.kubelet.config.Lacks != nil {
				m.kubelet.config.Lacks(w.pod, resource, id)
			}
		}
	}
}

// register connects an endpoint. It ends the connection of another endpoint in the way of the
// kubelet's version.
func (m *deviceManager) register(e *endpoint) error {
	if e.process.isDead() {
		return errors.New("the process was killed")
	}
	m.kubelet.mu.Lock()
	defer m.kubelet.mu.Unlock()
	if !m.kubelet.up {
		return errors.New("connection refused")
	}
	m.named[e.resource] = e
	if err := m.readOptions(e); err != nil {
		delete(m.named, e.resource)
		return err
	}
	if !m.kubelet.up {
		return errors.New("connection refused")
	}
	m.known[e.resource] = true
	m.endpoints[e.resource] = append(m.endpoints[e.resource], e)
	m.kubelet.log("resource %s is registered by %s", e.resource, e.process.name)
	m.kubelet.group.Go(func() { m.runClient(e) })
	return nil
}

// readOptions calls a plugin for its options, without holding the lock.
func (m *deviceManager) readOptions(e *endpoint) error {
	m.kubelet.mu.Unlock()
	defer m.kubelet.mu.Lock()
	if e.fails {
		return errors.New("failed to get device plugin options")
	}
	_, err := e.server.GetDevicePluginOptions(e.stream, &pluginapi.Empty{})
	return err
}

// runClient receives a plugin's lists until the stream ends. Kubelets up to 1.36 then disconnect
// the present endpoint of the resource, because endpoints had no other identity. They do nothing if
// a failed registration has removed the name
// (pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go, runClient and connectClient, in 1.25 to
// 1.36; by name and socket in 1.37).
func (m *deviceManager) runClient(e *endpoint) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = e.server.ListAndWatch(&pluginapi.Empty{}, stream{m.kubelet, e})
	}()
	select {
	case <-done:
		if e.speaks.Err() != nil {
			<-e.stream.Done()
		}
	case <-e.stream.Done():
	}
	m.kubelet.mu.Lock()
	defer m.kubelet.mu.Unlock()
	e.endStream()
	if m.kubelet.config.Minor <= 36 {
		m.disconnectNamed(e)
		return
	}
	if !slices.Contains(m.endpoints[e.resource], e) {
		return
	}
	m.kubelet.log("resource %s: the plugin of %s is disconnected", e.resource, e.process.name)
	m.removeEndpoint(e)
	if len(m.endpoints[e.resource]) == 0 && m.kubelet.up {
		m.healthy[e.resource] = nil
	}
}

// disconnectNamed models kubelets up to 1.36 at the end of an endpoint's stream.
func (m *deviceManager) disconnectNamed(e *endpoint) {
	named := m.named[e.resource]
	if named == nil {
		if all := m.endpoints[e.resource]; len(all) > 1 && all[len(all)-1] != e { // otherwise still called, in vain
			m.removeEndpoint(e)
		}
		return
	}
	delete(m.named, e.resource)
	named.endStream()
	m.kubelet.log("resource %s: the plugin of %s is disconnected", e.resource, named.process.name)
	m.endpoints[e.resource] = nil
	if m.kubelet.up {
		m.healthy[e.resource] = nil
	}
}

// removeEndpoint removes an endpoint from the endpoints that the kubelet calls.
func (m *deviceManager) removeEndpoint(e *endpoint) {
	m.endpoints[e.resource] = slices.DeleteFunc(slices.Clone(m.endpoints[e.resource]), func(other *endpoint) bool { return other == e })
}

// allocatePod calls plugins for the resources of a pod (pkg/kubelet/cm/devicemanager/manager.go,
// allocateContainerResources). A pod keeps earlier allocations, without a call.
func (m *deviceManager) allocatePod(ctx context.Context, pod *Pod) error {
	for _, resource := range slices.Sorted(maps.Keys(pod.Requests)) {
		e, ids, err := m.chooseIDs(ctx, pod, resource, pod.Requests[resource])
		if err != nil || len(ids) == 0 {
			if err != nil {
				return err
			}
			continue
		}
		response, err := e.callAllocate(ctx, ids)
		m.kubelet.mu.Lock()
		for _, id := range ids {
			delete(m.pending[resource], id)
		}
		if err != nil || !m.kubelet.up || ctx.Err() != nil {
			m.kubelet.mu.Unlock()
			return errors.Join(err, ctx.Err())
		}
		if m.allocated[pod.UID] == nil {
			m.allocated[pod.UID], m.nodesOf[pod.UID] = make(map[string][]string), make(map[string][]string)
		}
		m.allocated[pod.UID][resource], pod.started = ids, false
		m.nodesOf[pod.UID][resource] = nodesOf(response)
		m.kubelet.log("pod %s has %v of %s", pod, ids, resource)
		m.kubelet.mu.Unlock()
	}
	return nil
}

func nodesOf(response *pluginapi.AllocateResponse) (paths []string) {
	for _, container := range response.ContainerResponses {
		for _, device := range container.Devices {
			paths = append(paths, device.HostPath)
		}
	}
	return paths
}

// chooseIDs returns the IDs for a pod and the endpoint to call. It returns no IDs if the pod
// already has them.
func (m *deviceManager) chooseIDs(ctx context.Context, pod *Pod, resource string, n int) (*endpoint, []string, error) {
	m.kubelet.mu.Lock()
	defer m.kubelet.mu.Unlock()
	m.takeBack()
	healthy := m.healthy[resource]
	if len(healthy) == 0 {
		return nil, nil, fmt.Errorf("no healthy devices present; cannot allocate unhealthy devices %s", resource)
	}
	if had := m.allocated[pod.UID][resource]; len(had) > 0 {
		for _, id := range had {
			if !healthy[id] {
				return nil, nil, fmt.Errorf("previously allocated devices are no longer healthy; cannot allocate unhealthy devices %s", resource)
			}
		}
		return nil, nil, nil
	}
	var free []string
	for _, id := range slices.Sorted(maps.Keys(healthy)) {
		if m.podWithID(resource, id) == "" && m.pending[resource][id] == "" {
			free = append(free, id)
		}
	}
	all := m.endpoints[resource]
	if len(free) < n || len(all) == 0 {
		return nil, nil, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d", resource, n, len(free))
	}
	e := all[len(all)-1]
	m.kubelet.config.Random.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
	if n < len(free) && m.kubelet.config.Random.IntN(2) == 0 {
		free = m.preferredFirst(ctx, e, free, n)
	}
	ids := free[:n]
	if m.pending[resource] == nil {
		m.pending[resource] = make(map[string]types.UID)
	}
	for _, id := range ids {
		m.pending[resource][id] = pod.UID
	}
	return e, ids, nil
}

// preferredFirst puts the plugin's preferred IDs first. It calls the plugin without holding the
// lock.
func (m *deviceManager) preferredFirst(ctx context.Context, e *endpoint, free []string, n int) []string {
	m.kubelet.mu.Unlock()
	defer m.kubelet.mu.Lock()
	answer, err := e.server.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: free, AllocationSize: int32(n)},
	}})
	if err != nil || len(answer.ContainerResponses) != 1 {
		return free
	}
	ids := answer.ContainerResponses[0].DeviceIDs
	rest := slices.DeleteFunc(slices.Clone(free), func(id string) bool { return slices.Contains(ids, id) })
	if len(ids)+len(rest) != len(free) {
		return free // the plugin named IDs outside free
	}
	return append(slices.Clone(ids), rest...)
}

// callAllocate calls the plugin. If the plugin's process is killed, there is no answer.
func (e *endpoint) callAllocate(ctx context.Context, ids []string) (*pluginapi.AllocateResponse, error) {
	type answer struct {
		response *pluginapi.AllocateResponse
		err      error
	}
	if e.stream.Err() != nil {
		return nil, errors.New("the endpoint is stopped")
	}
	if e.leaves.Load() {
		next := e.awaitSuccessor(ctx)
		if next == nil {
			return nil, errors.New("this instance has ended, and no other has begun")
		}
		return next.callAllocate(ctx, ids)
	}
	answers := make(chan answer, 1)
	e.calls.Go(func() {
		response, err := e.server.Allocate(ctx, &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}})
		answers <- answer{response, err}
	})
	select {
	case a := <-answers:
		if e.process.isDead() {
			return nil, errors.New("the process was killed")
		}
		return a.response, a.err
	case <-e.process.dead:
		return nil, errors.New("the process was killed")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// podWithID returns the pod with an ID, "" if the ID is free.
func (m *deviceManager) podWithID(resource, id string) types.UID {
	for uid, devices := range m.allocated {
		if slices.Contains(devices[resource], id) {
			return uid
		}
	}
	return ""
}

// takeBack frees the devices of inactive pods. The kubelet does so on allocations and on calls of
// PodResources (pkg/kubelet/cm/devicemanager/manager.go, UpdateAllocatedDevices).
func (m *deviceManager) takeBack() {
	if !m.kubelet.ready {
		return
	}
	for uid := range m.allocated {
		if !m.kubelet.isActive(uid) {
			m.kubelet.log("devices %v of pod %s are taken back", m.allocated[uid], uid)
			delete(m.allocated, uid)
			delete(m.nodesOf, uid)
		}
	}
}

// Process is the kubelet's interface for one agent.
type Process struct {
	kubelet *Kubelet
	name    string
	dead    chan struct{}

	// Succeeded reports whether another agent waits for the end of this agent. Nil means no.
	Succeeded func() bool

	mu        sync.Mutex
	listeners []*listener
	left      []*endpoint // left by Serve to Linger
	listing   atomic.Bool // PodResources has listed the pods to this process
}

// NewProcess returns the interface for a new agent. The name is for messages.
func (k *Kubelet) NewProcess(name string) *Process {
	return &Process{kubelet: k, name: name, dead: make(chan struct{})}
}

// Kill ends the process for the kubelet: the kubelet ignores further answers of the process, and
// its sockets and streams end.
func (p *Process) Kill() {
	close(p.dead)
	go p.end()
}

func (p *Process) end() {
	p.mu.Lock()
	listeners := p.listeners
	p.listeners = nil
	p.mu.Unlock()
	for _, l := range listeners {
		l.Close()
	}
	p.kubelet.mu.Lock()
	defer p.kubelet.mu.Unlock()
	for _, all := range p.kubelet.devices.endpoints {
		for _, e := range all {
			if e.process == p {
				e.endStream()
			}
		}
	}
}

func (p *Process) isDead() bool {
	select {
	case <-p.dead:
		return true
	default:
		return false
	}
}

// Run implements legacy.Kubelet.
func (p *Process) Run(ctx context.Context) { <-ctx.Done() }

// Probe implements legacy.Kubelet.
func (p *Process) Probe(context.Context) error { return nil }

// Pods answers PodResources (pkg/kubelet/apis/podresources/server_v1.go, List): with the active
// pods from 1.34 on, and with all pods of the pod manager before. Init containers are left out. CDI
// devices are included from 1.34 on.
func (p *Process) Pods(ctx context.Context) (*kubeletapi.Listing, error) {
	k := p.kubelet
	if p.isDead() {
		return nil, errors.New("the process was killed")
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.up {
		return nil, errors.New("read PodResources: connection refused")
	}
	k.devices.takeBack()
	listing := &kubeletapi.Listing{}
	for _, uid := range slices.Sorted(maps.Keys(k.workers)) {
		w := k.workers[uid]
		if !w.known || k.config.Minor >= 34 && w.terminal {
			continue
		}
		c := &podresourcesapi.ContainerResources{Name: "main"}
		if !w.pod.Init {
			k.addDevices(w.pod, c)
		}
		listed := &podresourcesapi.PodResources{Namespace: w.pod.Namespace, Name: w.pod.Name, Containers: []*podresourcesapi.ContainerResources{c}}
		listing.Pods = append(listing.Pods, listed)
		p.listing.Store(true)
	}
	return listing, nil
}

// HasListing reports whether PodResources has listed the pods to the process.
func (p *Process) HasListing() bool { return p.listing.Load() }

// AllocatedIDs returns the content of the checkpoint, which is readable while the kubelet is down
// (pkg/kubelet/cm/devicemanager/manager.go, writeCheckpoint).
func (p *Process) AllocatedIDs() (map[string][]string, error) {
	k := p.kubelet
	k.mu.Lock()
	defer k.mu.Unlock()
	ids := make(map[string][]string)
	for _, devices := range k.devices.allocated {
		for resource, some := range devices {
			ids[resource] = append(ids[resource], some...)
		}
	}
	return ids, nil
}

// addDevices adds the devices of a pod's container.
func (k *Kubelet) addDevices(pod *Pod, c *podresourcesapi.ContainerResources) {
	for _, resource := range slices.Sorted(maps.Keys(k.devices.allocated[pod.UID])) {
		c.Devices = append(c.Devices, &podresourcesapi.ContainerDevices{ResourceName: resource, DeviceIds: slices.Clone(k.devices.allocated[pod.UID][resource])})
	}
	for _, name := range pod.Claims {
		info := k.dra.claims[pod.Namespace+"/"+name]
		if info == nil || k.config.Minor < 34 {
			continue
		}
		resources := &podresourcesapi.ClaimResource{DriverName: k.config.Driver}
		for _, id := range info.cdi {
			resources.CdiDevices = append(resources.CdiDevices, &podresourcesapi.CDIDevice{Name: id})
		}
		c.DynamicResources = append(c.DynamicResources, &podresourcesapi.DynamicResource{ClaimName: name, ClaimNamespace: pod.Namespace, ClaimResources: []*podresourcesapi.ClaimResource{resources}})
	}
}
