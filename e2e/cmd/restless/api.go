package main

import (
	"encoding/json"
	"net"
	"net/http"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/apitest"
)

// api keeps ResourceSlices, and has a node and any claim: the name of a claim is its UID, and begins with the device
// that it has, so that claims outlive the machine without being kept.
type api struct {
	apitest.Server

	mode chan string // a new value of the node's label chandler.dev/mode
}

// watchNodes tells of the node, which is in mode DRA, and once of another mode. The agent asks for no list.
func (a *api) watchNodes(w http.ResponseWriter, r *http.Request) {
	tell := func(kind, mode, version string) {
		node := nodeIn(mode, version)
		_ = json.NewEncoder(w).Encode(metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Object: &node}}) // the agent may have ended
		w.(http.Flusher).Flush()
	}
	w.Header().Set("Content-Type", "application/json")
	tell("ADDED", "DRA", "1")
	select {
	case mode := <-a.mode:
		tell("MODIFIED", mode, "2")
	case <-r.Context().Done():
	}
	<-r.Context().Done()
}

func nodeIn(mode, version string) metav1.PartialObjectMetadata {
	return metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{Kind: "PartialObjectMetadata", APIVersion: "meta.k8s.io/v1"},
		ObjectMeta: metav1.ObjectMeta{Name: "node", UID: "node-uid", ResourceVersion: version, Labels: map[string]string{"chandler.dev/mode": mode}},
	}
}

// serve serves at an address of this machine, which it returns.
func (a *api) serve() (url string, err error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	mux := a.Mux()
	mux.HandleFunc("GET /api/v1/nodes", a.watchNodes)
	mux.HandleFunc("GET /api/v1/nodes/node", func(w http.ResponseWriter, _ *http.Request) {
		node := nodeIn("DRA", "1")
		node.TypeMeta = metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}
		apitest.Respond(w, http.StatusOK, &node)
	})
	mux.HandleFunc("GET /apis/resource.k8s.io/v1/namespaces/n/resourceclaims/{name}", func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("name")
		device, _, _ := strings.Cut(name, ".")
		apitest.Respond(w, http.StatusOK, apitest.Claim(name, types.UID(name), device))
	})
	mux.HandleFunc("GET /apis/resource.k8s.io/v1/resourceclaims", func(w http.ResponseWriter, r *http.Request) { // none waits for a GPU
		apitest.ListOrWatch(w, r, &resourceapi.ResourceClaimList{
			TypeMeta: metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaimList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"},
		})
	})
	go func() { _ = http.Serve(listener, mux) }() //nolint:gosec // until the machine ends; only the agent asks
	return "http://" + listener.Addr().String(), nil
}
