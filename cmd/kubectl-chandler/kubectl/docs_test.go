package kubectl

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"k8s.io/client-go/kubernetes/fake"
)

// The documentation shows the output of the commands for the example cluster.
func TestDocumentation(t *testing.T) {
	page, err := os.ReadFile("../../../docs/kubectl.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?ms)^```\n\\$ kubectl chandler ([^\n]*)\n(.*?)^```").FindAllSubmatch(page, -1)
	if len(blocks) == 0 {
		t.Fatal("no command in docs/kubectl.md")
	}
	client := fake.NewClientset(example(t).Objects()...)
	shown := make(map[string]bool)
	for _, block := range blocks {
		args := strings.Fields(string(block[1]))
		shown[args[0]] = true
		if args[0] == "report" {
			_, client := withAgents(t)
			stdout, _ := report(t, client, 80, args[1:]...)
			if got, want := sizes.ReplaceAllString(stdout, "N KiB"), sizes.ReplaceAllString(string(block[2]), "N KiB"); got != want {
				t.Errorf("kubectl chandler %s prints\n%s\nwhere docs/kubectl.md has\n%s", block[1], got, want)
			}
			continue
		}
		if stdout, _, _ := run(t, client, 80, args...); stdout != string(block[2]) {
			t.Errorf("kubectl chandler %s prints\n%s\nwhere docs/kubectl.md has\n%s", block[1], stdout, block[2])
		}
	}
	for _, command := range PluginCommand("v1").Commands() {
		if name := command.Name(); name != "help" && !shown[name] && !strings.Contains(string(page), "| `kubectl chandler "+name+"` |") {
			t.Errorf("docs/kubectl.md does not show %s", name)
		}
	}
}
