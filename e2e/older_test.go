package e2e

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"chandler.dev/e2e/build"
)

// servesOnly returns a kubeconfig of a proxy to the cluster's API server. The proxy serves only the
// given version of resource.k8s.io.
func servesOnly(t *testing.T, version string) string {
	t.Helper()
	config := node.RESTConfig()
	transport, err := rest.TransportFor(config)
	if err != nil {
		t.Fatal(err)
	}
	at, err := url.Parse(config.Host)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(at)
	proxy.Transport = transport
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if rest, found := strings.CutPrefix(r.URL.Path, "/apis/resource.k8s.io/"); found && rest != version && !strings.HasPrefix(rest, version+"/") {
			http.NotFound(w, r)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	written := clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: server.URL}},
		Contexts:       map[string]*clientcmdapi.Context{"c": {Cluster: "c"}},
		CurrentContext: "c",
	}
	if err := clientcmd.WriteToFile(written, file); err != nil {
		t.Fatal(err)
	}
	return file
}

// equal fails the test unless both texts are equal within half a minute, and contain a GPU.
func equal(t *testing.T, version string, texts func() (got, want string)) {
	t.Helper()
	var got, want string
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(time.Second) {
		if got, want = texts(); got == want && strings.Contains(want, "gpu") {
			return
		}
	}
	t.Errorf("%s: top is\n%s\nwant\n%s", version, got, want)
}

// TestOlderVersionsOfDRA runs kubectl's plugin and doctor on a server without resource.k8s.io/v1,
// like 1.32 and 1.33. Both must read an older version and print the same result.
func TestOlderVersionsOfDRA(t *testing.T) {
	if *version == build.Classic {
		t.Skip("no resource.k8s.io")
	}
	offers(t)
	program := pluginProgram(t) // its build may take longer than a command may
	top := func(kubeconfig string) string {
		cmd := exec.CommandContext(within(t), program, "top", "-o", "json", "--kubeconfig", kubeconfig)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("top: %v", err)
		}
		return string(out)
	}
	for _, version := range []string{"v1beta2", "v1beta1"} {
		kubeconfig := servesOnly(t, version)
		// The agent may write its slices between the two commands, after the moves of an earlier test.
		equal(t, version, func() (got, want string) { return top(kubeconfig), top(node.Kubeconfig()) })
		out, err := exec.CommandContext(within(t), project.Agent, "doctor", "-o", "json", "--only", "cluster", "--host-root", node.NodePath("/"), "--node-name", node.NodeName(), "--kubeconfig", kubeconfig).Output()
		var says doctored
		if jsonErr := json.Unmarshal(out, &says); jsonErr != nil {
			t.Fatalf("doctor: %v, %v\n%s", err, jsonErr, out)
		}
		codes, text := says.codes()
		if slices.Contains(codes, "CH0601") || !strings.Contains(text, "resource.k8s.io/"+version+" is served, but not v1") {
			t.Errorf("%s: doctor finds %v:\n%s", version, codes, text)
		}
	}
}
