package e2e

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"

	"chandler.dev/internal/docs"
)

// TestObjectsOfDocs validates every Kubernetes object on the pages by a dry run, which includes the
// API server's admission. A test of cmd/chandler checks the objects that only Chandler reads.
func TestObjectsOfDocs(t *testing.T) {
	pages, err := docs.All("..")
	if err != nil {
		t.Fatal(err)
	}
	some := 0
	for _, page := range pages {
		for _, block := range page.Blocks() {
			text := block.Text
			if block.Lang == "yaml" && (strings.HasPrefix(text, "config:") || strings.HasPrefix(text, "constraints:")) {
				text = docs.ClaimWith(text)
			}
			if block.Lang != "yaml" || !strings.HasPrefix(text, "apiVersion: ") || strings.HasPrefix(text, "apiVersion: chandler.dev/") {
				continue
			}
			switch err := kube.DryRun(within(t), text); {
			case meta.IsNoMatchError(err):
				t.Logf("%s:%d: of another API: %v", page.Path, block.Line, err)
			case err != nil:
				t.Errorf("%s:%d: %v", page.Path, block.Line, err)
			default:
				some++
			}
		}
	}
	if some < 6 {
		t.Errorf("of the pages' objects it would create %d, fewer than there are", some)
	}
}
