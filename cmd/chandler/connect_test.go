package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/cobra"
	logsapi "k8s.io/component-base/logs/api/v1"
)

// Each claim of a burst is read before it is prepared. With client-go's default limit, the eleventh
// and all later claims would wait 200 ms each.
func TestBurstOfClaimsDoesNotWaitForTheClient(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	config := `{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"contexts": [{"name": "c", "context": {"cluster": "c"}}],
		"clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}]}`
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	o := &runOptions{logging: logsapi.NewLoggingConfiguration()}
	o.addFlags(&cobra.Command{})
	o.kubeconfig = file
	clients, err := o.connect()
	if err != nil {
		t.Fatal(err)
	}
	limiter := clients.main.ResourceV1().RESTClient().GetRateLimiter()
	for i := range 100 {
		if !limiter.TryAccept() {
			t.Fatalf("request %d has to wait", i+1)
		}
	}
	if !clients.status.ResourceV1().RESTClient().GetRateLimiter().TryAccept() {
		t.Error("the status of claims waits for requests of others")
	}
}
