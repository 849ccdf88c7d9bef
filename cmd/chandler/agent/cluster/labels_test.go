package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// watchServer answers watches of a node, one after the other.
type watchServer struct {
	t       *testing.T
	answers []func(w http.ResponseWriter, r *http.Request)

	mu    sync.Mutex
	asked []string // the start version of each watch
}

func (s *watchServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	metadataOnly := strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata") && !strings.Contains(r.Header.Get("Accept"), "application/json,")
	if r.Method != http.MethodGet || r.URL.Path != "/api/v1/nodes" || query.Get("watch") == "" || query.Get("fieldSelector") != "metadata.name=worker" || !metadataOnly {
		s.t.Errorf("request %s %s for %s", r.Method, r.URL, r.Header.Get("Accept"))
	}
	s.mu.Lock()
	n := len(s.asked)
	s.asked = append(s.asked, query.Get("resourceVersion"))
	s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	if n < len(s.answers) {
		s.answers[n](w, r)
		return
	}
	<-r.Context().Done()
}

// say writes an event.
func say(w http.ResponseWriter, event, version string, labels map[string]string) {
	node := metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"},
		ObjectMeta: metav1.ObjectMeta{Name: "worker", ResourceVersion: version, Labels: labels},
	}
	data, _ := json.Marshal(map[string]any{"type": event, "object": node})
	fmt.Fprintf(w, "%s\n", data)
	w.(http.Flusher).Flush()
}

// FollowLabels reports the labels at first and after each change. A watch continues where the last
// one ended, or begins again without a version if the API server no longer has that version. There
// are no other requests, and each reason for a failed watch is logged once.
func TestFollowLabels(t *testing.T) {
	t.Parallel()
	refuse := func(code int, reason metav1.StatusReason) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			_ = json.NewEncoder(w).Encode(metav1.Status{
				TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Code: int32(code), Reason: reason, Message: string(reason),
			})
		}
	}
	server := &watchServer{t: t}
	server.answers = []func(http.ResponseWriter, *http.Request){
		refuse(http.StatusForbidden, metav1.StatusReasonForbidden),
		refuse(http.StatusForbidden, metav1.StatusReasonForbidden),
		func(w http.ResponseWriter, _ *http.Request) {
			say(w, "ADDED", "10", nil)
			say(w, "MODIFIED", "11", map[string]string{"pool": "big"})
			say(w, "MODIFIED", "12", map[string]string{"pool": "big"}) // a change of its status
			say(w, "DELETED", "13", map[string]string{"pool": "big"})
			say(w, "ADDED", "14", map[string]string{"pool": "big", "zone": "a"})
			say(w, "BOOKMARK", "20", nil)
		},
		func(w http.ResponseWriter, _ *http.Request) {
			data, _ := json.Marshal(map[string]any{"type": "ERROR", "object": metav1.Status{
				TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired,
			}})
			fmt.Fprintf(w, "%s\n", data)
		},
		func(w http.ResponseWriter, _ *http.Request) { say(w, "ADDED", "30", map[string]string{}) },
	}
	web := httptest.NewServer(server)
	t.Cleanup(func() { web.CloseClientConnections(); web.Close() })
	client, err := metadata.NewForConfig(&rest.Config{Host: web.URL})
	if err != nil {
		t.Fatal(err)
	}
	var logged []string
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), funcr.New(func(_, args string) { logged = append(logged, args) }, funcr.Options{})))
	told, ended := make(chan map[string]string), make(chan struct{})
	go func() {
		defer close(ended)
		FollowLabels(ctx, client, "worker", func(l map[string]string) { told <- l })
	}()
	for _, want := range []map[string]string{{}, {"pool": "big"}, {"pool": "big", "zone": "a"}, {}} {
		select {
		case got := <-told:
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		case <-time.After(time.Minute):
			t.Fatalf("not told %v", want)
		}
	}
	cancel()
	<-ended
	if diff := cmp.Diff([]string{"", "", "", "20", ""}, server.asked); diff != "" {
		t.Errorf("versions of the watches: %s", diff)
	}
	if len(logged) != 1 || !strings.Contains(logged[0], "Forbidden") {
		t.Errorf("logged %q", logged)
	}
}
