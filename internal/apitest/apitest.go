// Package apitest provides a minimal API server for DRA over HTTP, for tests.
package apitest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
)

const version = "resource.k8s.io/v1"

// Server serves resource.k8s.io. It stores ResourceSlices and notifies watchers of changes.
// The zero value is ready to use.
type Server struct {
	mu      sync.Mutex
	slices  []resourceapi.ResourceSlice
	changed []metav1.WatchEvent // all changes of slices; their number is the resource version
	more    chan struct{}       // closed after the next change
}

// Mux returns the handler of the server. Other paths are not found, unless the caller adds
// them.
func (s *Server) Mux() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /apis/"+resourceapi.GroupName, func(w http.ResponseWriter, _ *http.Request) {
		served := metav1.GroupVersionForDiscovery{GroupVersion: version, Version: "v1"}
		WriteObject(w, http.StatusOK, &metav1.APIGroup{
			TypeMeta: metav1.TypeMeta{Kind: "APIGroup", APIVersion: "v1"},
			Name:     resourceapi.GroupName, Versions: []metav1.GroupVersionForDiscovery{served}, PreferredVersion: served,
		})
	})
	mux.HandleFunc("POST /apis/resource.k8s.io/v1/resourceslices", s.create)
	mux.HandleFunc("/apis/resource.k8s.io/v1/resourceslices", s.listOrWatch)
	mux.HandleFunc("PUT /apis/resource.k8s.io/v1/resourceslices/{name}", s.replace)
	mux.HandleFunc("DELETE /apis/resource.k8s.io/v1/resourceslices/{name}", s.remove)
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		writeRefusal(w, http.StatusNotFound, metav1.StatusReasonNotFound)
	})
	return mux
}

// Slices returns the stored slices.
func (s *Server) Slices() []resourceapi.ResourceSlice {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.slices)
}

func (s *Server) create(w http.ResponseWriter, r *http.Request) {
	slice := sliceOf(w, r)
	if slice == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	slice.Name = fmt.Sprint(slice.GenerateName, len(s.changed))
	if r.URL.Query().Get("dryRun") == "" {
		s.tell(watch.Added, slice)
		s.slices = append(s.slices, *slice)
	}
	WriteObject(w, http.StatusCreated, slice)
}

// tell sets the resource version of a slice and notifies watchers. The caller holds mu.
func (s *Server) tell(what watch.EventType, slice *resourceapi.ResourceSlice) {
	slice.ResourceVersion = fmt.Sprint(len(s.changed) + 1)
	s.changed = append(s.changed, metav1.WatchEvent{Type: string(what), Object: runtime.RawExtension{Object: slice.DeepCopy()}})
	if s.more != nil {
		close(s.more)
		s.more = nil
	}
}

func (s *Server) listOrWatch(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Has("watch") && !r.URL.Query().Has("sendInitialEvents") {
		s.watchChanges(w, r)
		return
	}
	s.mu.Lock()
	list := &resourceapi.ResourceSliceList{
		TypeMeta: metav1.TypeMeta{APIVersion: version, Kind: "ResourceSliceList"},
		ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(len(s.changed))}, Items: slices.Clone(s.slices),
	}
	s.mu.Unlock()
	ListOrWatch(w, r, list)
}

// watchChanges streams all changes since a resource version, until the client disconnects.
func (s *Server) watchChanges(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	since, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	for {
		s.mu.Lock()
		news := s.changed[min(since, len(s.changed)):]
		since += len(news)
		if s.more == nil {
			s.more = make(chan struct{})
		}
		more := s.more
		s.mu.Unlock()
		for _, event := range news {
			_ = json.NewEncoder(w).Encode(event) // the client may have disconnected
		}
		w.(http.Flusher).Flush()
		select {
		case <-more:
		case <-r.Context().Done():
			return
		}
	}
}

func (s *Server) replace(w http.ResponseWriter, r *http.Request) {
	slice := sliceOf(w, r)
	if slice == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.slices, func(kept resourceapi.ResourceSlice) bool { return kept.Name == slice.Name })
	if i < 0 {
		writeRefusal(w, http.StatusNotFound, metav1.StatusReasonNotFound)
		return
	}
	s.tell(watch.Modified, slice)
	s.slices[i] = *slice
	WriteObject(w, http.StatusOK, slice)
}

func (s *Server) remove(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slices = slices.DeleteFunc(s.slices, func(kept resourceapi.ResourceSlice) bool {
		removed := kept.Name == r.PathValue("name")
		if removed {
			s.tell(watch.Deleted, &kept)
		}
		return removed
	})
	WriteObject(w, http.StatusOK, &metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusSuccess})
}

// sliceOf returns the slice in a request, or nil after an error response.
func sliceOf(w http.ResponseWriter, r *http.Request) *resourceapi.ResourceSlice {
	data, err := io.ReadAll(r.Body)
	if err == nil {
		var object runtime.Object
		if object, _, err = scheme.Codecs.UniversalDeserializer().Decode(data, nil, nil); err == nil {
			if slice, ok := object.(*resourceapi.ResourceSlice); ok {
				slice.TypeMeta = metav1.TypeMeta{APIVersion: version, Kind: "ResourceSlice"}
				return slice
			}
		}
	}
	writeRefusal(w, http.StatusBadRequest, metav1.StatusReasonBadRequest)
	return nil
}

// AllocatedClaim returns a claim in namespace n with an allocated device of the node called node.
func AllocatedClaim(name string, uid types.UID, device string) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{
		TypeMeta:   metav1.TypeMeta{APIVersion: version, Kind: "ResourceClaim"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, UID: uid},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
	claim.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{{Request: "r", Driver: "chandler.dev", Pool: "node", Device: device}}
	return claim
}

// ListOrWatch serves a list of objects that never change.
func ListOrWatch(w http.ResponseWriter, r *http.Request, list runtime.Object) {
	switch {
	case r.URL.Query().Has("sendInitialEvents"):
		writeRefusal(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid) // the client then lists the objects
	case r.URL.Query().Has("watch"):
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	default:
		WriteObject(w, http.StatusOK, list)
	}
}

// WriteObject responds with an object.
func WriteObject(w http.ResponseWriter, status int, object runtime.Object) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(object) // the client may have disconnected
}

func writeRefusal(w http.ResponseWriter, status int, reason metav1.StatusReason) {
	WriteObject(w, status, &metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: reason, Code: int32(status),
	})
}
