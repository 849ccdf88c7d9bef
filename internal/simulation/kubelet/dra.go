package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// callTimeout is the time limit for a call of a driver (pkg/kubelet/cm/dra/plugin/dra_plugin.go,
// defaultClientCallTimeout, 1.34 to 1.37).
const callTimeout = 45 * time.Second

// reconcilePeriod is the interval between searches for claims of pods that are no longer active.
// The kubelet unprepares these claims (pkg/kubelet/cm/dra/manager.go, defaultReconcilePeriod).
const reconcilePeriod = 60 * time.Second

// draManager registers DRA drivers, and prepares claims (pkg/kubelet/cm/dra). The lock of the kubelet
// guards its fields.
type draManager struct {
	kubelet *Kubelet

	plugins []*plugin             // in the order of registration
	claims  map[string]*claimInfo // by namespace/name; the checkpoint is written with each change
	refuses bool                  // the kubelet refuses registrations

	forgotten  map[types.UID]bool // claims that were lost after their Prepare call
	unprepared map[types.UID]int  // number of completed Unprepare calls, by claim
	asked      map[types.UID]int  // number of Unprepare calls, by claim
}

// plugin is a registered DRA driver.
type plugin struct {
	registrar *listener
	endpoint  string
	conn      *grpc.ClientConn
	drapb.DRAPluginClient
}

// answerError returns the error of a call, and an error for an answer of a killed process.
func (p *plugin) answerError(err error) error {
	if err == nil && p.registrar.process.isDead() {
		return errors.New("the process was killed")
	}
	return err
}

// claimInfo is the kubelet's record of a claim in the checkpoint, with additional state that a
// restart loses.
type claimInfo struct {
	uid             types.UID
	namespace, name string
	pods            map[types.UID]bool
	cdi             []string

	prepared    bool // not in the checkpoint
	unpreparing bool
	asked       time.Time // the time of the last Unprepare call, or of its failure
	why         error     // the error of the last Unprepare call
}

// Pauses after a failed registration (k8s.io/kubernetes/pkg/util/goroutinemap/exponentialbackoff,
// in 1.37).
const (
	firstBackoff = 500 * time.Millisecond
	lastBackoff  = 2*time.Minute + 2*time.Second
)

// backoff is the time of the next attempt after a failed registration.
type backoff struct {
	pause time.Duration
	until time.Time
}

// watchPlugins registers the plugins with a socket, and drops the plugins whose socket is gone
// (pkg/kubelet/pluginmanager, reconciler).
func (m *draManager) watchPlugins(ctx context.Context) {
	failed := make(map[*listener]backoff)
	for {
		m.findPlugins(ctx, failed)
		if !sleep(ctx, time.Second) {
			return
		}
	}
}

func (m *draManager) findPlugins(ctx context.Context, failed map[*listener]backoff) {
	sockets := m.kubelet.network.registrationSockets()
	m.kubelet.mu.Lock()
	known := make(map[*listener]bool)
	m.plugins = slices.DeleteFunc(m.plugins, func(p *plugin) bool {
		if slices.Contains(sockets, p.registrar) {
			known[p.registrar] = true
			return false
		}
		m.kubelet.log("plugin at %s is gone", p.endpoint)
		p.conn.Close()
		return true
	})
	refuses := m.refuses
	m.kubelet.mu.Unlock()
	for _, socket := range sockets {
		if known[socket] || time.Now().Before(failed[socket].until) {
			continue
		}
		if err := m.registerPlugin(ctx, socket, refuses); err != nil {
			m.kubelet.log("plugin at %s is not registered: %v", socket.path, err)
			pause := min(max(2*failed[socket].pause, firstBackoff), lastBackoff)
			failed[socket] = backoff{pause, time.Now().Add(pause)}
		}
	}
}

func (m *draManager) connect(path string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+path, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return m.kubelet.network.dial(ctx, path) }))
}

// registerPlugin gets the information of the plugin at a registrar's socket, accepts or refuses the
// plugin, and notifies it of the result.
func (m *draManager) registerPlugin(ctx context.Context, socket *listener, refuses bool) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := m.connect(socket.path)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := registerapi.NewRegistrationClient(conn)
	info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return err
	}
	if refuses || m.kubelet.config.Minor < 34 {
		_, err := client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{Error: "not supported"})
		return errors.Join(errors.New("refused"), err)
	}
	calls, err := m.connect(info.Endpoint)
	if err != nil {
		return err
	}
	m.kubelet.mu.Lock()
	if !m.kubelet.up {
		m.kubelet.mu.Unlock()
		calls.Close()
		return errors.New("the kubelet stops")
	}
	m.plugins = append(m.plugins, &plugin{socket, info.Endpoint, calls, drapb.NewDRAPluginClient(calls)})
	m.kubelet.log("plugin %s registered at %s", info.Name, info.Endpoint)
	m.kubelet.mu.Unlock()
	_, err = client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true})
	return err
}

// chosenPlugin returns the plugin for calls: the newest connected one, or else the newest
// (pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go, get).
func (m *draManager) chosenPlugin() (*plugin, error) {
	m.kubelet.mu.Lock()
	defer m.kubelet.mu.Unlock()
	for _, p := range slices.Backward(m.plugins) {
		if m.kubelet.network.has(p.endpoint) {
			return p, nil
		}
	}
	if len(m.plugins) == 0 {
		return nil, fmt.Errorf("DRA driver %s is not registered", m.kubelet.config.Driver)
	}
	return m.plugins[len(m.plugins)-1], nil
}

// CalledProcess returns the name of the process that plugin would choose, "" if no plugin is
// registered.
func (k *Kubelet) CalledProcess() string {
	p, err := k.dra.chosenPlugin()
	if err != nil {
		return ""
	}
	return p.registrar.process.name
}

// prepare prepares the claims of a pod (pkg/kubelet/cm/dra/manager.go, prepareResources). The
// claims are stored in the checkpoint before the call.
func (m *draManager) prepare(ctx context.Context, pod *Pod) error {
	if len(pod.Claims) == 0 {
		return nil
	}
	var found []*resourceapi.ResourceClaim
	for _, name := range pod.Claims {
		claim, err := m.kubelet.config.Client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("fetch ResourceClaim %s: %w", name, err)
		}
		if !m.isReserved(claim, pod) {
			return fmt.Errorf("pod %s is not allowed to use ResourceClaim %s", pod, name)
		}
		if claim.Status.Allocation == nil {
			return fmt.Errorf("ResourceClaim %s is not allocated", name)
		}
		if m.allocatedHere(claim) {
			found = append(found, claim)
		}
	}
	driver, err := m.chosenPlugin()
	if err != nil {
		return err
	}
	request, err := m.recordClaims(pod, found)
	if err != nil || len(request.Claims) == 0 {
		return err
	}
	calling, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	response, err := driver.NodePrepareResources(calling, request)
	if err = driver.answerError(err); err != nil {
		return fmt.Errorf("NodePrepareResources: %w", err)
	}
	m.kubelet.mu.Lock()
	defer m.kubelet.mu.Unlock()
	for uid, result := range response.Claims {
		if result.Error != "" {
			return fmt.Errorf("NodePrepareResources failed for ResourceClaim %s: %s", uid, result.Error)
		}
		info := m.claimOf(types.UID(uid))
		if info == nil {
			return fmt.Errorf("unable to get claim info for ResourceClaim %s", uid)
		}
		if m.kubelet.config.Minor >= 37 {
			info.cdi = nil
		}
		for _, device := range result.Devices {
			for _, id := range device.CdiDeviceIds {
				if !slices.Contains(info.cdi, id) {
					info.cdi = append(info.cdi, id)
				}
			}
		}
	}
	if missing := len(request.Claims) - len(response.Claims); missing != 0 {
		return fmt.Errorf("NodePrepareResources skipped %d ResourceClaims", missing)
	}
	for _, claim := range request.Claims {
		if info := m.claimOf(types.UID(claim.Uid)); info != nil {
			info.prepared = true
			m.kubelet.log("claim %s is prepared: %s", claim.Name, strings.Join(info.cdi, " "))
		}
	}
	return nil
}

// isReserved reports whether a pod may use a claim. Models from 1.37 on also accept a reservation
// for the pod's PodGroup. Kubelets from 1.36 on have a feature gate for such reservations
// (pkg/kubelet/cm/dra/manager.go, prepareResources).
func (m *draManager) isReserved(claim *resourceapi.ResourceClaim, pod *Pod) bool {
	return slices.ContainsFunc(claim.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool {
		return r.UID == pod.UID || m.kubelet.config.Minor >= 37 && r.Resource == "podgroups" && r.Name == pod.Group
	})
}

// recordClaims stores a pod's claims in the checkpoint, and returns the claims to prepare. Up to
// 1.36, a claim whose Unprepare is in progress or has failed counts as prepared for another pod;
// from 1.37 on, that pod waits (pkg/kubelet/cm/dra/manager.go, prepareResources: isPrepared in
// 1.36, isUnpreparing before it in 1.37).
func (m *draManager) recordClaims(pod *Pod, claims []*resourceapi.ResourceClaim) (*drapb.NodePrepareResourcesRequest, error) {
	m.kubelet.mu.Lock()
	defer m.kubelet.mu.Unlock()
	request := &drapb.NodePrepareResourcesRequest{}
	for _, claim := range claims {
		key := claim.Namespace + "/" + claim.Name
		info := m.claims[key]
		switch {
		case info == nil:
			info = &claimInfo{uid: claim.UID, namespace: claim.Namespace, name: claim.Name, pods: make(map[types.UID]bool)}
			m.claims[key] = info
			delete(m.forgotten, info.uid)
		case info.uid != claim.UID:
			return nil, fmt.Errorf("old ResourceClaim with same name %s and different UID %s still exists (previous pod force-deleted?!)", claim.Name, info.uid)
		case m.kubelet.config.Minor >= 37 && info.unpreparing:
			return nil, fmt.Errorf("ResourceClaim %s is being unprepared", claim.Name)
		}
		info.pods[pod.UID] = true
		if !info.prepared {
			request.Claims = append(request.Claims, &drapb.Claim{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)})
		}
	}
	return request, nil
}

func (m *draManager) claimOf(uid types.UID) *claimInfo {
	for _, info := range m.claims {
		if info.uid == uid {
			return info
		}
	}
	return nil
}

// unprepareClaims unprepares the claims of a pod (pkg/kubelet/cm/dra/manager.go,
// unprepareResources). Up to 1.36, a pod without a reference to a claim, because the claim was
// never prepared for the pod, still unprepares the claim if a single other pod has it.
func (m *draManager) unprepareClaims(ctx context.Context, pod types.UID, namespace string, names []string) error {
	m.kubelet.mu.Lock()
	request := &drapb.NodeUnprepareResourcesRequest{}
	var keys []string
	for _, name := range names {
		key := namespace + "/" + name
		info := m.claims[key]
		if info == nil || m.kubelet.config.Minor >= 37 && !info.pods[pod] {
			continue
		}
		if len(info.pods) > 1 {
			delete(info.pods, pod)
			continue
		}
		info.unpreparing, info.asked = true, time.Now()
		m.asked[info.uid]++
		request.Claims = append(request.Claims, &drapb.Claim{Namespace: namespace, Name: name, Uid: string(info.uid)})
		keys = append(keys, key)
	}
	m.kubelet.mu.Unlock()
	if len(request.Claims) == 0 {
		return nil
	}
	err := m.callUnprepare(ctx, request)
	m.kubelet.mu.Lock()
	defer m.kubelet.mu.Unlock()
	for i, key := range keys {
		info := m.claims[key]
		if info == nil || string(info.uid) != request.Claims[i].Uid {
			continue
		}
		info.asked = time.Now()
		if info.why = err; err == nil {
			m.kubelet.log("claim %s is unprepared", key)
			m.unprepared[info.uid]++
			if len(info.pods) > 1 { // up to 1.36, a pod may have joined meanwhile
				m.forgotten[info.uid] = true
			}
			delete(m.claims, key)
		}
	}
	return err
}

func (m *draManager) callUnprepare(ctx context.Context, request *drapb.NodeUnprepareResourcesRequest) error {
	driver, err := m.chosenPlugin()
	if err != nil {
		return err
	}
	calling, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	response, err := driver.NodeUnprepareResources(calling, request)
	if err = driver.answerError(err); err != nil {
		return fmt.Errorf("NodeUnprepareResources: %w", err)
	}
	for uid, result := range response.Claims {
		if result.Error != "" {
			return fmt.Errorf("NodeUnprepareResources failed for ResourceClaim %s: %s", uid, result.Error)
		}
	}
	if missing := len(request.Claims) - len(response.Claims); missing != 0 {
		return fmt.Errorf("NodeUnprepareResources skipped %d ResourceClaims", missing)
	}
	return nil
}

// reconcileClaims unprepares the claims of pods that are no longer active, even if their containers
// still run (pkg/kubelet/cm/dra/manager.go, reconcileLoop).
func (m *draManager) reconcileClaims(ctx context.Context) {
	for sleep(ctx, reconcilePeriod) {
		m.kubelet.mu.Lock()
		type orphan struct {
			pod       types.UID
			namespace string
			name      string
		}
		var orphans []orphan
		for _, info := range m.claims {
			for pod := range info.pods {
				if m.kubelet.ready && !m.kubelet.isActive(pod) {
					orphans = append(orphans, orphan{pod, info.namespace, info.name})
				}
			}
		}
		m.kubelet.mu.Unlock()
		for _, o := range orphans {
			if err := m.unprepareClaims(ctx, o.pod, o.namespace, []string{o.name}); err != nil {
				m.kubelet.log("reconcile: claim %s/%s: %v", o.namespace, o.name, err)
			}
		}
	}
}
