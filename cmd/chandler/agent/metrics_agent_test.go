package agent

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families/amdgpu"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/kubeletapi"
)

// The metrics of a running agent contain the containers of allocations once the kubelet has listed
// the containers, the published slices, and the scans.
func TestAgentIsMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		config := n.config(&rules.Rules{})
		config.FS, config.Families = recordedHost(t, "amdgpu/testdata/mi210x8.host"), []*discovery.Family{amdgpu.Family}
		pods := config.Kubelet.Pods
		config.Kubelet.Pods = func(ctx context.Context) (*kubeletapi.Listing, error) {
			said, err := pods(ctx)
			said.Pods = append(said.Pods, &podresourcesapi.PodResources{Namespace: "default", Name: "train", Containers: []*podresourcesapi.ContainerResources{{
				Name: "main", DynamicResources: []*podresourcesapi.DynamicResource{{ClaimName: "claim", ClaimNamespace: "default", ClaimResources: []*podresourcesapi.ClaimResource{{
					CdiDevices: []*podresourcesapi.CDIDevice{{Name: cdi.ID("uid-0-pci-0000-23-00-0")}},
				}}}},
			}}})
			return said, err
		}
		handlers := make(chan http.Handler, 1)
		config.Serve = func(ctx context.Context, handler http.Handler) error {
			handlers <- handler
			<-ctx.Done()
			return nil
		}
		stop := n.run(config)
		time.Sleep(time.Minute)
		if _, err := n.prepare("pci-0000-23-00-0"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		answer := httptest.NewRecorder()
		(<-handlers).ServeHTTP(answer, httptest.NewRequest("GET", "/metrics", nil))
		stop()
		text := answer.Body.String()
		for _, want := range []string{
			`chandler_device_allocated{api="DRA",claim="claim",container="main",device="pci-0000-23-00-0",namespace="default",node="node",pci_address="0000:23:00.0",pci_bus_id="00000000:23:00.0",pod="train",request="r",resource="",uuid="2f3a5c9e10d40000"} 1`,
			"chandler_dra_prepared_claims 1", "chandler_dra_registered 1", "chandler_dra_published_slices 1", "chandler_dra_published_devices 8",
			"chandler_scan_hanging_reads 0", `chandler_dra_duration_seconds_count{operation="prepare",result="success",stage="claim"} 1`,
		} {
			if !strings.Contains(text, want+"\n") {
				t.Errorf("%s is not said", want)
			}
		}
		if strings.Contains(text, "chandler_scan_duration_seconds_count 0\n") {
			t.Error("no scan is counted")
		}
		if t.Failed() {
			t.Log(text)
		}
	})
}
