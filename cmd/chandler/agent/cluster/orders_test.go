package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"chandler.dev/internal/removal"
)

// Orders are reported when they change. Deleting the ConfigMap revokes no order.
func TestFollowOrders(t *testing.T) {
	t.Parallel()
	a, b := removal.Order{Phase: removal.Withhold, ID: "a", Beat: 1}, removal.Order{Phase: removal.Remove, ID: "a", Beat: 2}
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/namespaces/ns/configmaps" || r.URL.Query().Get("fieldSelector") != "metadata.name=chandler" {
			t.Errorf("request %s", r.URL)
		}
		w.Header().Set("Content-Type", "application/json")
		for _, event := range []struct{ kind, text string }{
			{"ADDED", ""}, {"MODIFIED", a.String()}, {"MODIFIED", a.String()}, {"MODIFIED", b.String()}, {"DELETED", ""}, {"ADDED", "nonsense"},
		} {
			object := metav1.PartialObjectMetadata{
				TypeMeta:   metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"},
				ObjectMeta: metav1.ObjectMeta{Name: "chandler", ResourceVersion: "1", Annotations: map[string]string{removal.Annotation: event.text}},
			}
			data, _ := json.Marshal(map[string]any{"type": event.kind, "object": object})
			fmt.Fprintf(w, "%s\n", data)
		}
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	t.Cleanup(func() { web.CloseClientConnections(); web.Close() })
	client, err := metadata.NewForConfig(&rest.Config{Host: web.URL})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	told, ended := make(chan removal.Order), make(chan struct{})
	go func() {
		defer close(ended)
		FollowOrders(ctx, client, "ns", func(o removal.Order) { told <- o })
	}()
	for _, want := range []removal.Order{a, b, {}} {
		select {
		case got := <-told:
			if got != want {
				t.Errorf("told %+v, want %+v", got, want)
			}
		case <-time.After(time.Minute):
			t.Fatalf("not told %+v", want)
		}
	}
	cancel()
	<-ended
}
