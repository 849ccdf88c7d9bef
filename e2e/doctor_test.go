package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
)

// doctored is the output of "chandler doctor -o json".
type doctored struct {
	Success    bool
	Categories []struct {
		CategoryName string
		Checks       []struct{ Description, Result, Code, Cause string }
	}
}

// codes returns the codes of all findings, and all checks as text.
func (d *doctored) codes() (codes []string, text string) {
	if d == nil {
		return nil, "doctor has not answered in time"
	}
	for _, category := range d.Categories {
		for _, check := range category.Checks {
			text += fmt.Sprintf("%s: %s: %s %s %s\n", category.CategoryName, check.Result, check.Code, check.Description, check.Cause)
			if check.Code != "" && !slices.Contains(codes, check.Code) {
				codes = append(codes, check.Code)
			}
		}
	}
	slices.Sort(codes)
	return codes, text
}

// onNode returns a command that runs doctor on the node as root, with the credentials of the
// kubelet.
func onNode(ctx context.Context) *exec.Cmd {
	return node.Command(ctx, project.Agent, "doctor", "-o", "json", "--host-root", chandler.HostDir, "--runtime-root", chandler.HostDir,
		"--node-name", node.NodeName(), "--kubeconfig", "/etc/kubernetes/kubelet.kubeconfig")
}

// inPod returns a command that runs doctor in the agent's pod, without options except the output
// format.
func inPod(ctx context.Context) *exec.Cmd {
	return node.Kubectl(ctx, "exec", "-n", chandler.Namespace, "daemonset/"+chandler.DaemonSet, "--", "/chandler", "doctor", "-o", "json")
}

// examine runs doctor, which must return a report. The result is nil if the time is over.
func examine(t *testing.T, cmd *exec.Cmd) *doctored {
	t.Helper()
	out, err := cmd.Output()
	var failed *exec.ExitError
	if errors.As(err, &failed) && failed.ExitCode() < 0 {
		return nil // killed because the time is over
	}
	if err != nil && (!errors.As(err, &failed) || failed.ExitCode() != 1) {
		t.Fatalf("doctor: %v\n%s", err, out)
	}
	var says doctored
	if err := json.Unmarshal(out, &says); err != nil {
		t.Fatalf("doctor: %v:\n%s", err, out)
	}
	if says.Success == (err != nil) {
		t.Errorf("exit code %v, success %t", err, says.Success)
	}
	return &says
}

// knownFaults are the faults of the recorded hosts on the node: one NPU is in reset.
var knownFaults = []string{"CH0302"}

// TestDoctor expects no findings on a healthy node, and the right code for each of several faults.
func TestDoctor(t *testing.T) {
	if *version == build.Classic {
		t.Skip("the faults are of DRA")
	}
	offers(t)
	var lacks []string
	for gate, code := range map[string]string{"DRADeviceTaints": "CH0602", "DRAPartitionableDevices": "CH0602", "DRAExtendedResource": "CH0603"} {
		if !has(t, gate) {
			lacks = append(lacks, code)
		}
	}
	lacking := func(code string) bool { return slices.Contains(lacks, code) }
	finds := func(t *testing.T, run func(context.Context) *exec.Cmd, want ...string) {
		t.Helper()
		want = slices.Sorted(slices.Values(append(want, knownFaults...)))
		last := errors.New("it has not answered")
		until(t, fmt.Sprintf("doctor to find %v, besides what the version lacks: %v", want, lacks), func(ctx context.Context) error {
			report := examine(t, run(ctx))
			if report == nil {
				return last
			}
			found, text := report.codes()
			last = nil
			if found := slices.DeleteFunc(found, lacking); !slices.Equal(found, want) {
				last = fmt.Errorf("found %v:\n%s", found, text)
			}
			return last
		})
	}
	t.Run("healthy", func(t *testing.T) {
		finds(t, onNode)
		finds(t, inPod)
		for name, run := range map[string]func(context.Context) *exec.Cmd{"on the node": onNode, "in the pod": inPod} {
			_, text := examine(t, run(within(t))).codes()
			t.Logf("%s:\n%s", name, text)
		}
	})
	t.Run("inventory in the pod", func(t *testing.T) {
		out, err := node.Kubectl(within(t), "exec", "-n", chandler.Namespace, "daemonset/"+chandler.DaemonSet, "--", "/chandler", "inventory", "-o", "json").Output()
		var says struct{ Devices []struct{ Name string } }
		if err := errors.Join(err, json.Unmarshal(out, &says)); err != nil {
			t.Fatal(err)
		}
		if len(says.Devices) < 8 {
			t.Errorf("it looks elsewhere than the agent: %s", out)
		}
	})
	t.Run("another plugin", func(t *testing.T) {
		end := serveOther(t, "aws.amazon.com/neuron")
		defer end()
		finds(t, onNode, "CH0104")
		finds(t, inPod, "CH0104")
	})
	// When a DeviceClass like this one is deleted, the scheduler forgets the extended resource
	// instead of using the other class again (deviceclass/extendedresourcecache, OnDelete, in
	// 1.37). No other test uses this resource.
	t.Run("a class that shadows ours", func(t *testing.T) {
		apply(t, `
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: doctor-shadow}
spec:
  extendedResourceName: aws.amazon.com/neuron
  selectors:
  - cel: {expression: device.driver == "gpu.amd.com"}
`)
		if !has(t, "DRAExtendedResource") {
			t.Skip("the API server drops the name")
		}
		finds(t, inPod, "CH0604")
	})
	t.Run("a claim for more than there is", func(t *testing.T) {
		apply(t, `
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: doctor-many, namespace: default}
spec:
  devices:
    requests:
    - name: gpus
      exactly: {deviceClassName: amdgpu.chandler.dev, allocationMode: ExactCount, count: 31}
`)
		finds(t, func(ctx context.Context) *exec.Cmd {
			cmd := inPod(ctx)
			cmd.Args = append(cmd.Args, "--all-nodes")
			return cmd
		}, "CH0610")
	})
	t.Run("a spec that is left", func(t *testing.T) {
		file := node.NodePath(chandler.CDIDir + "/chandler.dev-claim_5d0cd0c4-1111-2222-3333-444455556666.json")
		t.Cleanup(func() { os.Remove(file) })
		spec := `{"cdiVersion":"0.6.0","kind":"chandler.dev/claim","devices":[{"name":"5d0cd0c4-1111-2222-3333-444455556666-0-none","containerEdits":{"env":["A=B"]}}]}`
		finds(t, func(ctx context.Context) *exec.Cmd { // The agent removes the file after a while.
			if err := os.WriteFile(file, []byte(spec), 0o644); err != nil {
				t.Fatal(err)
			}
			return onNode(ctx)
		}, "CH0204")
	})
	t.Run("an agent that hangs", func(t *testing.T) {
		pids := agentPIDs(t)
		if len(pids) != 1 {
			t.Fatalf("processes of the agent: %q; want one", pids)
		}
		signal := func(name string) {
			if out, err := node.Command(within(t), "kill", name, pids[0]).CombinedOutput(); err != nil {
				t.Errorf("kill %s %s: %v: %s", name, pids[0], err, out)
			}
		}
		signal("-STOP")
		found, text := examine(t, inPod(within(t))).codes()
		signal("-CONT")
		if !slices.Contains(found, "CH0701") {
			t.Errorf("found %v:\n%s", found, text)
		}
	})
	if err := chandler.WaitForAgent(within(t), kube); err != nil {
		t.Error(err)
	}
	offers(t)
}

// other is a device plugin of another vendor.
type other struct {
	pluginapi.UnimplementedDevicePluginServer

	ends chan struct{}
}

// serveOther registers another device plugin for a resource. The function end withdraws the
// plugin's device before the plugin stops.
func serveOther(t *testing.T, resource string) (end func()) {
	t.Helper()
	dir := node.NodePath("/var/lib/kubelet/device-plugins")
	o := &other{ends: make(chan struct{})}
	listener, err := net.Listen("unix", dir+"/other.sock")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, o)
	go func() { _ = server.Serve(listener) }()
	conn, err := grpc.NewClient("unix://"+dir+"/kubelet.sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = pluginapi.NewRegistrationClient(conn).Register(within(t), &pluginapi.RegisterRequest{Version: pluginapi.Version, Endpoint: "other.sock", ResourceName: resource})
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		close(o.ends)
		server.GracefulStop()
		os.Remove(dir + "/other.sock")
	}
}

// GetDevicePluginOptions implements [pluginapi.DevicePluginServer].
func (o *other) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

// ListAndWatch implements [pluginapi.DevicePluginServer].
func (o *other) ListAndWatch(_ *pluginapi.Empty, to grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	list := &pluginapi.ListAndWatchResponse{Devices: []*pluginapi.Device{{ID: "not-ours", Health: pluginapi.Healthy}}}
	if err := to.Send(list); err != nil {
		return err
	}
	<-o.ends
	return to.Send(&pluginapi.ListAndWatchResponse{})
}
