package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
)

// api keeps ResourceSlices, and has a node and any claim: the name of a claim is its UID, and begins with the device
// that it has, so that claims outlive the machine without being kept.
type api struct {
	mode chan string // a new value of the node's label chandler.dev/mode

	mu     sync.Mutex
	slices []resourceapi.ResourceSlice
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
	mux := http.NewServeMux()
	mux.HandleFunc("GET /apis", func(w http.ResponseWriter, _ *http.Request) {
		version := metav1.GroupVersionForDiscovery{GroupVersion: "resource.k8s.io/v1", Version: "v1"}
		respond(w, http.StatusOK, &metav1.APIGroupList{
			TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"},
			Groups:   []metav1.APIGroup{{Name: "resource.k8s.io", Versions: []metav1.GroupVersionForDiscovery{version}, PreferredVersion: version}},
		})
	})
	mux.HandleFunc("GET /api/v1/nodes", a.watchNodes)
	mux.HandleFunc("GET /api/v1/nodes/node", func(w http.ResponseWriter, _ *http.Request) {
		node := nodeIn("DRA", "1")
		node.TypeMeta = metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}
		respond(w, http.StatusOK, &node)
	})
	mux.HandleFunc("GET /apis/resource.k8s.io/v1/namespaces/n/resourceclaims/{name}", func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("name")
		device, _, _ := strings.Cut(name, ".")
		claim := &resourceapi.ResourceClaim{
			TypeMeta:   metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, UID: types.UID(name)},
			Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
		}
		claim.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{{Request: "r", Driver: "chandler.dev", Pool: "node", Device: device}}
		respond(w, http.StatusOK, claim)
	})
	mux.HandleFunc("GET /apis/resource.k8s.io/v1/resourceclaims", func(w http.ResponseWriter, r *http.Request) { // none waits for a GPU
		listOrWatch(w, r, &resourceapi.ResourceClaimList{
			TypeMeta: metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaimList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"},
		})
	})
	mux.HandleFunc("/apis/resource.k8s.io/v1/resourceslices", a.serveSlices)
	mux.HandleFunc("PUT /apis/resource.k8s.io/v1/resourceslices/{name}", a.replaceSlice)
	mux.HandleFunc("DELETE /apis/resource.k8s.io/v1/resourceslices/{name}", a.deleteSlice)
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
	})
	go func() { _ = http.Serve(listener, mux) }() //nolint:gosec // until the machine ends; only the agent asks
	return "http://" + listener.Addr().String(), nil
}

// sliceOf returns the slice that a client sent, nil after an answer that says that it is none.
func sliceOf(w http.ResponseWriter, r *http.Request) *resourceapi.ResourceSlice {
	data, err := io.ReadAll(r.Body)
	if err == nil {
		var object runtime.Object
		if object, _, err = scheme.Codecs.UniversalDeserializer().Decode(data, nil, nil); err == nil {
			if slice, ok := object.(*resourceapi.ResourceSlice); ok {
				slice.TypeMeta = metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceSlice"}
				return slice
			}
		}
	}
	refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest)
	return nil
}

func (a *api) replaceSlice(w http.ResponseWriter, r *http.Request) {
	slice := sliceOf(w, r)
	if slice == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range a.slices {
		if a.slices[i].Name == slice.Name {
			a.slices[i] = *slice
			respond(w, http.StatusOK, slice)
			return
		}
	}
	refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
}

func (a *api) deleteSlice(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range a.slices {
		if a.slices[i].Name == r.PathValue("name") {
			a.slices = append(a.slices[:i:i], a.slices[i+1:]...)
			break
		}
	}
	respond(w, http.StatusOK, &metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusSuccess})
}

func (a *api) serveSlices(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch r.Method {
	case http.MethodPost:
		slice := sliceOf(w, r)
		if slice == nil {
			return
		}
		slice.Name = fmt.Sprint(slice.GenerateName, len(a.slices))
		if r.URL.Query().Get("dryRun") == "" {
			a.slices = append(a.slices, *slice)
		}
		respond(w, http.StatusCreated, slice)
	default:
		list := &resourceapi.ResourceSliceList{
			TypeMeta: metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceSliceList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"},
			Items: slices.Clone(a.slices),
		}
		a.mu.Unlock()
		listOrWatch(w, r, list)
		a.mu.Lock()
	}
}

// listOrWatch answers with a list of objects of which nothing is told later.
func listOrWatch(w http.ResponseWriter, r *http.Request, list runtime.Object) {
	switch {
	case r.URL.Query().Has("sendInitialEvents"):
		refuse(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid) // so that it is listed
	case r.URL.Query().Has("watch"):
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	default:
		respond(w, http.StatusOK, list)
	}
}

func respond(w http.ResponseWriter, status int, object runtime.Object) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(object) // to one that may not listen any more
}

func refuse(w http.ResponseWriter, status int, reason metav1.StatusReason) {
	respond(w, status, &metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: reason, Code: int32(status),
	})
}
