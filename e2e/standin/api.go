// Package standin provides a stand-in kubelet and API server for guests, which have neither. Both
// implement only the parts that an agent needs.
package standin

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/internal/apitest"
)

// API is an API server that stores ResourceSlices. It has a node named node, and every claim in
// namespace n. The name of a claim is also its UID. The name begins with the name of the claim's
// device and a dot, so that claims survive the machine without being stored. If one of the other
// dot-separated words is vfio, the claim requests the device under vfio. If a word is "pod" with a
// UID, the claim is reserved for that pod.
type API struct {
	apitest.Server

	// Mode is the node's label chandler.dev/mode. The caller sends new values of the label to
	// Modes.
	Mode  string
	Modes chan string
	// Published is called after each write of a slice. Optional.
	Published func()
}

// Serve serves at an address of this machine, and returns the content of a kubeconfig for it.
func (a *API) Serve(address string) (kubeconfig string, err error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return "", err
	}
	mux := a.Mux()
	mux.HandleFunc("GET /api/v1/nodes", a.watchNodes)
	mux.HandleFunc("GET /api/v1/nodes/node", func(w http.ResponseWriter, _ *http.Request) {
		node := nodeIn(a.Mode, "1")
		node.TypeMeta = metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}
		apitest.WriteObject(w, http.StatusOK, &node)
	})
	mux.HandleFunc("GET /apis/resource.k8s.io/v1/namespaces/n/resourceclaims/{name}", func(w http.ResponseWriter, r *http.Request) {
		apitest.WriteObject(w, http.StatusOK, claim(r.PathValue("name")))
	})
	// No claim waits.
	mux.HandleFunc("GET /apis/resource.k8s.io/v1/resourceclaims", func(w http.ResponseWriter, r *http.Request) {
		apitest.ListOrWatch(w, r, &resourceapi.ResourceClaimList{
			TypeMeta: metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaimList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"},
		})
	})
	mux.HandleFunc("/apis/resource.k8s.io/v1/namespaces/n/resourceclaims/{name}/status", func(w http.ResponseWriter, r *http.Request) {
		apitest.WriteObject(w, http.StatusOK, claim(r.PathValue("name")))
	})
	mux.HandleFunc("GET /api/v1/pods", func(w http.ResponseWriter, r *http.Request) {
		apitest.ListOrWatch(w, r, &corev1.PodList{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"},
		})
	})
	serve := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mux.ServeHTTP(w, r)
		if r.Method != http.MethodGet && strings.Contains(r.URL.Path, "/resourceslices") && a.Published != nil {
			a.Published()
		}
	})
	go func() { _ = http.Serve(listener, serve) }() //nolint:gosec // runs until the machine ends, with the agent as only client
	return fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c,
		clusters: [{name: c, cluster: {server: "http://%s"}}], contexts: [{name: c, context: {cluster: c}}]}`, listener.Addr()), nil
}

// watchNodes sends the node and an event for each new mode. The agent only watches, without a list
// request.
func (a *API) watchNodes(w http.ResponseWriter, r *http.Request) {
	tell := func(kind, mode, version string) {
		node := nodeIn(mode, version)
		// The agent may have ended.
		_ = json.NewEncoder(w).Encode(metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Object: &node}})
		w.(http.Flusher).Flush()
	}
	w.Header().Set("Content-Type", "application/json")
	tell("ADDED", a.Mode, "1")
	for version := 2; ; version++ {
		select {
		case mode := <-a.Modes:
			tell("MODIFIED", mode, fmt.Sprint(version))
		case <-r.Context().Done():
			return
		}
	}
}

func nodeIn(mode, version string) metav1.PartialObjectMetadata {
	node := metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{Kind: "PartialObjectMetadata", APIVersion: "meta.k8s.io/v1"},
		ObjectMeta: metav1.ObjectMeta{Name: "node", UID: "node-uid", ResourceVersion: version},
	}
	if mode != "" {
		node.Labels = map[string]string{"chandler.dev/mode": mode}
	}
	return node
}

func claim(name string) *resourceapi.ResourceClaim {
	words := strings.Split(name, ".")
	claim := apitest.AllocatedClaim(name, types.UID(name), words[0])
	for _, word := range words[1:] {
		if uid, reserved := strings.CutPrefix(word, "pod"); reserved {
			claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: word, UID: types.UID(uid)}}
		}
		if word != "vfio" {
			continue
		}
		parameters := []byte(fmt.Sprintf(`{"apiVersion": %q, "kind": "ClaimParameters", "driver": "vfio"}`, v1alpha1.APIVersion))
		claim.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
			Source: resourceapi.AllocationConfigSourceClaim,
			DeviceConfiguration: resourceapi.DeviceConfiguration{
				Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: "chandler.dev", Parameters: runtime.RawExtension{Raw: parameters}},
			},
		}}
	}
	return claim
}
