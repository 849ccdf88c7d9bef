package main

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/internal/apitest"
)

// apiServer stores ResourceSlices and serves a node and a claim for KVM, and nothing else.
type apiServer struct{ apitest.Server }

// startAPIServer starts the API server at its address.
func (s *station) startAPIServer() *apiServer {
	s.t.Helper()
	listener, err := net.Listen("tcp", s.apiserver)
	if err != nil {
		s.t.Fatal(err)
	}
	a := &apiServer{}
	mux := a.Mux()
	mux.HandleFunc("GET /api/v1/nodes/node", func(w http.ResponseWriter, _ *http.Request) {
		apitest.WriteObject(w, http.StatusOK, &metav1.PartialObjectMetadata{
			TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{Name: "node", UID: "node-uid"},
		})
	})
	mux.HandleFunc("GET /apis/resource.k8s.io/v1/namespaces/n/resourceclaims/kvm", func(w http.ResponseWriter, _ *http.Request) {
		apitest.WriteObject(w, http.StatusOK, apitest.AllocatedClaim("kvm", "kvm-uid", "kvm"))
	})
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: mux}}
	server.Start()
	s.t.Cleanup(func() {
		server.CloseClientConnections() // watches
		server.Close()
	})
	return a
}

// devices returns the number of devices in the only slice, or an error if there is not exactly one
// slice.
func (a *apiServer) devices() (int, error) {
	kept := a.Slices()
	if len(kept) != 1 {
		return 0, fmt.Errorf("%d slices", len(kept))
	}
	return len(kept[0].Spec.Devices), nil
}
