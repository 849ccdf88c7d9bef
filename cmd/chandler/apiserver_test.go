package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
)

// apiServer keeps ResourceSlices, has a node and a claim for KVM, and nothing
// else.
type apiServer struct {
	mu     sync.Mutex
	slices []resourceapi.ResourceSlice
}

// startAPIServer starts the API server at its address.
func (s *station) startAPIServer() *apiServer {
	s.t.Helper()
	listener, err := net.Listen("tcp", s.apiserver)
	if err != nil {
		s.t.Fatal(err)
	}
	a := &apiServer{}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /apis", func(w http.ResponseWriter, _ *http.Request) {
		version := metav1.GroupVersionForDiscovery{GroupVersion: "resource.k8s.io/v1", Version: "v1"}
		respond(w, http.StatusOK, &metav1.APIGroupList{
			TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"},
			Groups:   []metav1.APIGroup{{Name: "resource.k8s.io", Versions: []metav1.GroupVersionForDiscovery{version}, PreferredVersion: version}},
		})
	})
	mux.HandleFunc("GET /api/v1/nodes/node", func(w http.ResponseWriter, _ *http.Request) {
		respond(w, http.StatusOK, &metav1.PartialObjectMetadata{
			TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{Name: "node", UID: "node-uid"},
		})
	})
	mux.HandleFunc("GET /apis/resource.k8s.io/v1/namespaces/n/resourceclaims/kvm", func(w http.ResponseWriter, _ *http.Request) {
		claim := &resourceapi.ResourceClaim{
			TypeMeta:   metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "kvm", UID: "kvm-uid"},
			Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
		}
		claim.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{{Request: "r", Driver: "chandler.dev", Pool: "node", Device: "kvm"}}
		respond(w, http.StatusOK, claim)
	})
	mux.HandleFunc("/apis/resource.k8s.io/v1/resourceslices", a.serveSlices)
	mux.HandleFunc("PUT /apis/resource.k8s.io/v1/resourceslices/{name}", a.replaceSlice)
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
	})
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: mux}}
	server.Start()
	s.t.Cleanup(func() {
		server.CloseClientConnections() // watches
		server.Close()
	})
	return a
}

// sliceOf returns the slice that a client sent, nil after an answer that says
// that it is none.
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

func (a *apiServer) replaceSlice(w http.ResponseWriter, r *http.Request) {
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

func (a *apiServer) serveSlices(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case r.Method == http.MethodPost:
		slice := sliceOf(w, r)
		if slice == nil {
			return
		}
		slice.Name = fmt.Sprint(slice.GenerateName, len(a.slices))
		if r.URL.Query().Get("dryRun") == "" {
			a.slices = append(a.slices, *slice)
		}
		respond(w, http.StatusCreated, slice)
	case r.URL.Query().Has("sendInitialEvents"):
		refuse(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid) // so that it is listed
	case r.URL.Query().Has("watch"):
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		a.mu.Unlock()
		<-r.Context().Done()
		a.mu.Lock()
	default:
		respond(w, http.StatusOK, &resourceapi.ResourceSliceList{
			TypeMeta: metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceSliceList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"}, Items: a.slices,
		})
	}
}

func respond(w http.ResponseWriter, status int, object runtime.Object) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(object) // one that does not listen any more
}

func refuse(w http.ResponseWriter, status int, reason metav1.StatusReason) {
	respond(w, status, &metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: reason, Code: int32(status),
	})
}

// devices returns how many devices are in the one slice, or an error.
func (a *apiServer) devices() (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.slices) != 1 {
		return 0, fmt.Errorf("%d slices", len(a.slices))
	}
	return len(a.slices[0].Spec.Devices), nil
}
