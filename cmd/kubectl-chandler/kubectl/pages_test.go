package kubectl

import (
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// divideLists lets the API server answer each list in pages of one object. The result counts the
// requests for further pages, by resource.
func divideLists(t *testing.T, client *fake.Clientset) (pages map[string]int) {
	pages = make(map[string]int)
	client.PrependReactor("list", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		list := action.(clienttesting.ListActionImpl)
		if list.ListOptions.Limit != 500 && list.ListOptions.FieldSelector == "" {
			t.Errorf("a list of %s has the limit %d, want 500", list.Resource.Resource, list.ListOptions.Limit)
		}
		all, err := client.Tracker().List(list.Resource, list.Kind, list.Namespace)
		if err != nil {
			return true, nil, err
		}
		objects, err := meta.ExtractList(all)
		if err != nil {
			return true, nil, err
		}
		first := 0
		if list.ListOptions.Continue != "" {
			pages[list.Resource.Resource]++
			if first, err = strconv.Atoi(list.ListOptions.Continue); err != nil {
				return true, nil, err
			}
		}
		last := min(first+1, len(objects))
		if list.ListOptions.Limit == 0 {
			last = len(objects)
		}
		if err := meta.SetList(all, objects[first:last]); err != nil {
			return true, nil, err
		}
		if accessor, err := meta.ListAccessor(all); err == nil && last < len(objects) {
			accessor.SetContinue(strconv.Itoa(last))
		}
		return true, all, nil
	})
	return pages
}

// The commands read long lists in pages, and print the same.
func TestPages(t *testing.T) {
	_, whole := withAgents(t)
	_, divided := withAgents(t)
	pages := divideLists(t, divided)
	for _, args := range [][]string{
		{"top"}, {"who", "gpu-node-07"}, {"why", "ml/train-42"}, {cobra.ShellCompRequestCmd, "who", "-n", "ml", ""},
	} {
		want, _, _ := run(t, whole, 80, args...)
		got, stderr, _ := run(t, divided, 80, args...)
		if diff := cmp.Diff(want, got); diff != "" || want == "" {
			t.Errorf("%q: (-whole +pages):\n%s%s", args, diff, stderr)
		}
	}
	_, want := report(t, whole, 80, "gpu-node-06", "--with-identities")
	_, got := report(t, divided, 80, "gpu-node-06", "--with-identities")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("report (-whole +pages):\n%s", diff)
	}
	for _, resource := range []string{"pods", "nodes", "resourceclaims", "resourceslices", "deviceclasses", "events"} {
		if pages[resource] == 0 {
			t.Errorf("%s were not read in pages", resource)
		}
	}
}
