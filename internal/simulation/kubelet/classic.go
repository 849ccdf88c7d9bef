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

// endpoint is a device plugin that has registered for a resource.
type endpoint struct {
	process  *Process
	resource string
	server   pluginapi.DevicePluginServer

	stream context.Context // of ListAndWatch; it ends when the kubelet drops the endpoint
	drop   context.CancelFunc
	speaks context.Context // ends when the stream is to stay and say no more, too
	mute   context.CancelFunc
	fails  bool          // its registration is meant to fail
	lost   chan struct{} // closed when the stream has ended
	once   sync.Once
	calls  sync.WaitGroup
	leaves atomic.Bool // its agent has ended, and another is to answer
}

// lose ends the stream, from either side.
func (e *endpoint) lose() {
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

// Send takes a list (pkg/kubelet/cm/devicemanager/manager.go,
// genericDeviceUpdateCallback): it replaces all that is known of the resource,
// whichever endpoint says it.
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
	k.healthy[s.endpoint.resource] = healthy
	k.noteList(s.endpoint.resource, list)
	k.log("resource %s has devices %v, sick %v", s.endpoint.resource, slices.Sorted(maps.Keys(healthy)), sick)
	return nil
}

// noteList notes a list, and which IDs it is without.
func (k *Kubelet) noteList(resource string, list *pluginapi.ListAndWatchResponse) {
	listed := make(map[string]bool)
	for _, d := range list.Devices {
		listed[d.ID] = true
	}
	k.lists[resource] = listed
	for _, w := range k.workers {
		for _, id := range k.devices[w.pod.UID][resource] {
			if !listed[id] && k.active(w.pod.UID) && k.config.Lacks != nil {
				k.config.Lacks(w.pod, resource, id)
			}
		}
	}
}

// register connects an endpoint, and ends the connection of another as its
// version does.
func (k *Kubelet) register(e *endpoint) error {
	if e.process.isDead() {
		return errors.New("the process was killed")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.up {
		return errors.New("connection refused")
	}
	k.named[e.resource] = e
	if err := k.options(e); err != nil {
		delete(k.named, e.resource)
		return err
	}
	if !k.up {
		return errors.New("connection refused")
	}
	k.known[e.resource] = true
	k.endpoints[e.resource] = append(k.endpoints[e.resource], e)
	k.log("resource %s is registered by %s", e.resource, e.process.name)
	k.group.Go(func() { k.runClient(e) })
	return nil
}

// options asks a plugin for its options, without the lock.
func (k *Kubelet) options(e *endpoint) error {
	k.mu.Unlock()
	defer k.mu.Lock()
	if e.fails {
		return errors.New("failed to get device plugin options")
	}
	_, err := e.server.GetDevicePluginOptions(e.stream, &pluginapi.Empty{})
	return err
}

// runClient receives a plugin's lists until the stream ends. To 1.36 it then
// disconnects whoever has the resource's name by now, since endpoints were known
// by that alone, and does nothing if a registration that failed has taken the name
// away (pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go, runClient and
// connectClient, in 1.25 to 1.36; by name and socket in 1.37).
func (k *Kubelet) runClient(e *endpoint) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = e.server.ListAndWatch(&pluginapi.Empty{}, stream{k, e})
	}()
	select {
	case <-done:
		if e.speaks.Err() != nil {
			<-e.stream.Done()
		}
	case <-e.stream.Done():
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	e.lose()
	if k.config.Minor <= 36 {
		k.disconnectNamed(e)
		return
	}
	if !slices.Contains(k.endpoints[e.resource], e) {
		return
	}
	k.log("resource %s: the plugin of %s is disconnected", e.resource, e.process.name)
	k.without(e)
	if len(k.endpoints[e.resource]) == 0 && k.up {
		k.healthy[e.resource] = nil
	}
}

// disconnectNamed is what a kubelet to 1.36 does when the stream of an endpoint has
// ended.
func (k *Kubelet) disconnectNamed(e *endpoint) {
	named := k.named[e.resource]
	if named == nil {
		if all := k.endpoints[e.resource]; len(all) > 1 && all[len(all)-1] != e { // else it is called still, in vain
			k.without(e)
		}
		return
	}
	delete(k.named, e.resource)
	named.lose()
	k.log("resource %s: the plugin of %s is disconnected", e.resource, named.process.name)
	k.endpoints[e.resource] = nil
	if k.up {
		k.healthy[e.resource] = nil
	}
}

// without takes an endpoint from those that the kubelet may call.
func (k *Kubelet) without(e *endpoint) {
	k.endpoints[e.resource] = slices.DeleteFunc(slices.Clone(k.endpoints[e.resource]), func(other *endpoint) bool { return other == e })
}

// allocate asks plugins for what a pod requests (pkg/kubelet/cm/devicemanager/
// manager.go, allocateContainerResources). It still has what it was
// given before, without a call.
func (k *Kubelet) allocate(ctx context.Context, pod *Pod) error {
	for _, resource := range slices.Sorted(maps.Keys(pod.Requests)) {
		e, ids, err := k.choose(ctx, pod, resource, pod.Requests[resource])
		if err != nil || len(ids) == 0 {
			if err != nil {
				return err
			}
			continue
		}
		response, err := e.allocate(ctx, ids)
		k.mu.Lock()
		for _, id := range ids {
			delete(k.pending[resource], id)
		}
		if err != nil || !k.up || ctx.Err() != nil {
			k.mu.Unlock()
			return errors.Join(err, ctx.Err())
		}
		if k.devices[pod.UID] == nil {
			k.devices[pod.UID], k.nodesOf[pod.UID] = make(map[string][]string), make(map[string][]string)
		}
		k.devices[pod.UID][resource] = ids
		k.nodesOf[pod.UID][resource] = nodesOf(response)
		k.log("pod %s has %v of %s", pod, ids, resource)
		k.mu.Unlock()
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

// choose returns which IDs a pod is to be given, and by which endpoint; none if
// it has them already.
func (k *Kubelet) choose(ctx context.Context, pod *Pod, resource string, n int) (*endpoint, []string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.takeBack()
	healthy := k.healthy[resource]
	if len(healthy) == 0 {
		return nil, nil, fmt.Errorf("no healthy devices present; cannot allocate unhealthy devices %s", resource)
	}
	if had := k.devices[pod.UID][resource]; len(had) > 0 {
		for _, id := range had {
			if !healthy[id] {
				return nil, nil, fmt.Errorf("previously allocated devices are no longer healthy; cannot allocate unhealthy devices %s", resource)
			}
		}
		return nil, nil, nil
	}
	var free []string
	for _, id := range slices.Sorted(maps.Keys(healthy)) {
		if k.holder(resource, id) == "" && k.pending[resource][id] == "" {
			free = append(free, id)
		}
	}
	all := k.endpoints[resource]
	if len(free) < n || len(all) == 0 {
		return nil, nil, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d", resource, n, len(free))
	}
	e := all[len(all)-1]
	k.config.Random.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
	if n < len(free) && k.config.Random.IntN(2) == 0 {
		free = k.preferred(ctx, e, free, n)
	}
	ids := free[:n]
	if k.pending[resource] == nil {
		k.pending[resource] = make(map[string]types.UID)
	}
	for _, id := range ids {
		k.pending[resource][id] = pod.UID
	}
	return e, ids, nil
}

// preferred puts first what the plugin prefers. It is asked without the lock.
func (k *Kubelet) preferred(ctx context.Context, e *endpoint, free []string, n int) []string {
	k.mu.Unlock()
	defer k.mu.Lock()
	answer, err := e.server.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: free, AllocationSize: int32(n)},
	}})
	if err != nil || len(answer.ContainerResponses) != 1 {
		return free
	}
	ids := answer.ContainerResponses[0].DeviceIDs
	rest := slices.DeleteFunc(slices.Clone(free), func(id string) bool { return slices.Contains(ids, id) })
	if len(ids)+len(rest) != len(free) {
		return free // it named others
	}
	return append(slices.Clone(ids), rest...)
}

// allocate calls the plugin. One whose process is killed does not answer.
func (e *endpoint) allocate(ctx context.Context, ids []string) (*pluginapi.AllocateResponse, error) {
	type answer struct {
		response *pluginapi.AllocateResponse
		err      error
	}
	if e.stream.Err() != nil {
		return nil, errors.New("the endpoint is stopped")
	}
	if e.leaves.Load() {
		next := e.successor(ctx)
		if next == nil {
			return nil, errors.New("this instance has ended, and no other has begun")
		}
		return next.allocate(ctx, ids)
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

// holder returns the pod that has an ID, "" if none has.
func (k *Kubelet) holder(resource, id string) types.UID {
	for uid, devices := range k.devices {
		if slices.Contains(devices[resource], id) {
			return uid
		}
	}
	return ""
}

// takeBack frees the devices of pods that are not active any more
// (pkg/kubelet/cm/devicemanager/manager.go, UpdateAllocatedDevices), which it
// does when devices are asked for and when PodResources is.
func (k *Kubelet) takeBack() {
	if !k.ready {
		return
	}
	for uid := range k.devices {
		if !k.active(uid) {
			k.log("devices %v of pod %s are taken back", k.devices[uid], uid)
			delete(k.devices, uid)
			delete(k.nodesOf, uid)
		}
	}
}

// Process is what the kubelet has of one agent.
type Process struct {
	kubelet *Kubelet
	name    string
	dead    chan struct{}

	// Succeeded reports whether another agent waits for this one to end. Nil
	// means that none does.
	Succeeded func() bool

	mu        sync.Mutex
	listeners []*listener
	left      []*endpoint // that Serve has left to Linger
}

// Process returns what a new agent has of the kubelet. Its name is for messages.
func (k *Kubelet) Process(name string) *Process {
	return &Process{kubelet: k, name: name, dead: make(chan struct{})}
}

// Kill ends the process for the kubelet: nothing that it answers is heard any more,
// and its sockets and streams end.
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
	for _, all := range p.kubelet.endpoints {
		for _, e := range all {
			if e.process == p {
				e.lose()
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

// Pods answers PodResources (pkg/kubelet/apis/podresources/server_v1.go, List):
// active pods from 1.34 on, all that the pod manager has before. Init containers
// are left out. CDI devices are there from 1.34 on.
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
		return nil, errors.New("ask PodResources: connection refused")
	}
	k.takeBack()
	listing := &kubeletapi.Listing{}
	for _, uid := range slices.Sorted(maps.Keys(k.workers)) {
		w := k.workers[uid]
		if !w.known || k.config.Minor >= 34 && w.terminal {
			continue
		}
		c := &podresourcesapi.ContainerResources{Name: "main"}
		if !w.pod.Init {
			k.list(w.pod, c)
		}
		listed := &podresourcesapi.PodResources{Namespace: w.pod.Namespace, Name: w.pod.Name, Containers: []*podresourcesapi.ContainerResources{c}}
		listing.Pods = append(listing.Pods, listed)
	}
	return listing, nil
}

// Allocated returns what is in the checkpoint, which can be read while the kubelet is down
// (pkg/kubelet/cm/devicemanager/manager.go, writeCheckpoint).
func (p *Process) Allocated() (map[string][]string, error) {
	k := p.kubelet
	k.mu.Lock()
	defer k.mu.Unlock()
	ids := make(map[string][]string)
	for _, devices := range k.devices {
		for resource, some := range devices {
			ids[resource] = append(ids[resource], some...)
		}
	}
	return ids, nil
}

// list adds what a pod's container has.
func (k *Kubelet) list(pod *Pod, c *podresourcesapi.ContainerResources) {
	for _, resource := range slices.Sorted(maps.Keys(k.devices[pod.UID])) {
		c.Devices = append(c.Devices, &podresourcesapi.ContainerDevices{ResourceName: resource, DeviceIds: slices.Clone(k.devices[pod.UID][resource])})
	}
	for _, name := range pod.Claims {
		info := k.claims[pod.Namespace+"/"+name]
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
