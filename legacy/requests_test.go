package legacy

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/internal/kubeletapi"
	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list/listtest"
)

// An init container may have a device for hours, and so may a pod whose device the kubelet has
// forgotten. The API server receives a request about each at once, and then at longer and longer
// intervals, although the kubelet is polled every few seconds.
func TestRequestsAboutGrantsAreRare(t *testing.T) {
	config := configFor(kubelettest.New(t))
	train := &podresourcesapi.PodResources{Namespace: "default", Name: "train", Containers: []*podresourcesapi.ContainerResources{
		{Name: "main", Devices: []*podresourcesapi.ContainerDevices{{ResourceName: listtest.Resource, DeviceIds: []string{"b"}}}},
	}}
	config.ListPods = func(context.Context) (*kubeletapi.Listing, error) {
		return &kubeletapi.Listing{Whole: true, Pods: []*podresourcesapi.PodResources{train}}, nil
	}
	pending, ended := 0, 0
	config.PendingPods = func(context.Context, string) (bool, error) { pending++; return true, nil }
	config.PodEnded = func(context.Context, string, string) (bool, error) { ended++; return false, nil }
	p := New(config)
	open(t, p)
	synctest.Test(t, func(t *testing.T) {
		p.pollOnce(t.Context(), "")
		l := listsOf(listtest.GPU("a"), listtest.GPU("b"))[listtest.Resource]
		if _, err := p.allocateIDs(t.Context(), l, listtest.Resource, [][]string{{"a"}, {"b"}}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(config.UnconfirmedAfter + time.Second)
		p.pollOnce(t.Context(), "")
		train.Containers[0].Devices = nil // the kubelet has lost its checkpoint
		p.pollOnce(t.Context(), "")
		if pending != 1 || ended != 1 {
			t.Errorf("%d and %d requests at first, want 1 and 1", pending, ended)
		}
		for range time.Hour / (5 * time.Second) {
			time.Sleep(5 * time.Second)
			p.pollOnce(t.Context(), "")
		}
		for _, n := range []int{pending, ended} {
			if n < 20 || n > 45 {
				t.Errorf("%d and %d requests in an hour, want 20 to 45 each", pending, ended)
				break
			}
		}
	})
}
