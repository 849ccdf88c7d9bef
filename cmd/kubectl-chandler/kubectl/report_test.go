package kubectl

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"

	"chandler.dev/cmd/kubectl-chandler/kubectl/reporttest"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/fleet"
	"chandler.dev/internal/fleet/fleettest"
)

// recordedHost is the host recording of the test agents.
const recordedHost = hosts + "nvidia/testdata/h100-mig.host"

// secretText is a secret in every object of the cluster that can contain one.
const secretText = "hunter2hunter2"

// withAgents returns a cluster with agents on its nodes, and a client of the cluster.
func withAgents(t *testing.T) (*fleettest.Cluster, *fake.Clientset) {
	t.Helper()
	c := example(t)
	c.Classes[0].Spec.Config = []resourceapi.DeviceClassConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
		Driver: "other.example.com", Parameters: runtime.RawExtension{Raw: []byte(`{"word":"` + secretText + `"}`)},
	}}}}
	objects := c.Objects()
	labels := map[string]string{"app.kubernetes.io/name": "chandler"}
	template := corev1.PodSpec{
		Containers: []corev1.Container{{
			Name: "chandler", Args: []string{"run", "--host-root=/host", "--config=/etc/chandler/config.yaml", "--kube-token=" + secretText},
			Env: []corev1.EnvVar{{Name: "PASSWORD", Value: secretText}}, Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}},
		}},
		Volumes: []corev1.Volume{{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "chandler"}}}}},
	}
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "chandler", Name: "chandler", Labels: labels, Annotations: map[string]string{"x": secretText}}}
	set.Spec.Template.Spec = template
	objects = append(objects, set,
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "chandler", Name: "chandler"}, Data: map[string]string{"config.yaml": "mode: DRA\n# token: " + secretText + "\n"}},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "chandler", Name: "s"}, StringData: map[string]string{"x": secretText}},
		&corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "chandler", Name: "e1"}, InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "ml", Name: "train-42"}, Message: "dial 10.17.23.5: bearer " + secretText},
		&corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "e2"}, InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "other", Name: "private"}, Message: "nobody's business"})
	for _, node := range []string{"gpu-node-06", "gpu-node-07"} {
		objects = append(objects, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "chandler", Name: "chandler-" + node, Labels: labels, OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: "chandler", Controller: new(true)}}},
			Spec:       func() corev1.PodSpec { spec := *template.DeepCopy(); spec.NodeName = node; return spec }(),
			Status:     corev1.PodStatus{Phase: corev1.PodRunning},
		})
	}
	client := fake.NewClientset(objects...)
	client.AddProxyReactor("pods", func(clienttesting.Action) (bool, rest.ResponseWrapper, error) {
		return true, response("chandler_device_allocated{uuid=\"GPU-5d2c1f52-8a41-4e0b-9c37-0b6f3d9ae452\"} 1\n"), nil
	})
	return c, client
}

// sizes matches sizes of compressed data, which depend on pseudonyms.
var sizes = regexp.MustCompile(`\d+ (?:KiB|B)\b`)

type response string

func (r response) DoRaw(context.Context) ([]byte, error)         { return []byte(r), nil }
func (r response) Stream(context.Context) (io.ReadCloser, error) { return nil, errors.New("no") }

// doctorOutput is sample output of chandler doctor -o json.
const doctorOutput = `{"success":false,"categories":[{"categoryName":"kubelet","checks":[
{"description":"another plugin serves nvidia.com/gpu","result":"error","code":"CH0104"},
{"description":"degraded","result":"warning","code":"CH0307"},{"description":"well","result":"success"}]}]}`

// report runs the command and returns its output, and the files of the archive.
func report(t *testing.T, client *fake.Clientset, width int, args ...string) (stdout string, files map[string]string) {
	t.Helper()
	t.Chdir(t.TempDir())
	host, err := os.ReadFile(filepath.Join(here, recordedHost))
	if err != nil {
		t.Fatal(err)
	}
	o := newOptions("v1.2.3")
	o.Client, o.width, o.now = client, width, func() time.Time { return fleettest.Now }
	o.Exec = func(_ context.Context, pod *corev1.Pod, command []string) (out, errOut []byte, err error) {
		switch {
		case pod.Spec.NodeName == "gpu-node-07":
			return nil, []byte("pods \"x\" is forbidden: cannot create pods/exec\n"), errors.New("exit code 1")
		case slices.Equal(command, []string{"/chandler", "record", "--host-root=/host", "--config=/etc/chandler/config.yaml"}):
			return host, nil, nil
		case slices.Equal(command, []string{"/chandler", "doctor", "-o", "json"}):
			return []byte(doctorOutput), nil, errors.New("exit code 1")
		}
		return nil, nil, errors.New("no such command")
	}
	cmd := &cobra.Command{Use: "kubectl-chandler", SilenceUsage: true, SilenceErrors: true}
	cmd.AddCommand(newReport(o))
	var out, errOut bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&errOut)
	cmd.SetArgs(append([]string{"report"}, args...))
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatalf("report: %v\n%s", err, errOut.String())
	}
	const name = "chandler-report-2026-11-20T095021Z.tar.gz"
	info, err := os.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("others may read the archive: %s", info.Mode())
	}
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return out.String(), reporttest.UnpackArchive(t, data)
}

// here is the directory of the package. Tests of reports change the working directory.
var here = func() string {
	dir, err := os.Getwd()
	if err != nil {
		panic(err)
	}
	return dir
}()

// identities returns the identities of the devices of the cluster and of the recorded host.
func identities(t *testing.T, c *fleettest.Cluster) (out []string) {
	t.Helper()
	for i := range c.Slices {
		for j := range c.Slices[i].Spec.Devices {
			d := &c.Slices[i].Spec.Devices[j]
			out = append(out, fleet.Text(d, "uuid"), fleet.Text(d, "serial"))
		}
	}
	for _, d := range scan.ReadHost(discoverytest.ReadHost(t, filepath.Join(here, recordedHost)), families.All).Devices {
		out = append(out, d.Identity)
	}
	out = append(out, "10.17.23.5")
	return slices.DeleteFunc(out, func(s string) bool { return s == "" })
}

// A report is complete, and contains neither a secret nor an identity.
func TestReport(t *testing.T) {
	c, client := withAgents(t)
	private := identities(t, c)
	stdout, files := report(t, client, 80, "gpu-node-06", "gpu-node-07")
	for _, want := range []string{
		"README.txt", "cluster/resourceslices.json", "cluster/resourceclaims.json", "cluster/deviceclasses.json", "cluster/events.json", "cluster/nodes.json", "cluster/pods.json",
		"config/daemonset-chandler.json", "config/chandler-config.yaml", "nodes/gpu-node-06/recorded.host", "nodes/gpu-node-06/doctor.json", "nodes/gpu-node-06/agent.log", "nodes/gpu-node-06/metrics.txt", "nodes/gpu-node-07/agent.log",
	} {
		if files[want] == "" {
			t.Errorf("the archive lacks %s", want)
		}
	}
	if len(private) < 10 {
		t.Fatalf("only %d identities to look for", len(private))
	}
	for name, content := range files {
		for _, secret := range append(private, secretText, "nobody's business") {
			if strings.Contains(content, secret) {
				t.Errorf("%s has %q in it", name, secret)
			}
		}
		if strings.HasSuffix(name, ".json") && !json.Valid([]byte(content)) {
			t.Errorf("%s is no JSON any more", name)
		}
	}
	for _, want := range []string{"recorded host of gpu-node-07", "cannot create pods/exec", "doctor (1 ✗ CH0104, 1 ! CH0307)", "Events"} {
		if text := strings.Join(strings.Fields(stdout), " "); !strings.Contains(text, want) {
			t.Errorf("standard output does not say %q:\n%s", want, stdout)
		}
	}
	discoverytest.CompareGolden(t, filepath.Join(here, "testdata/report-80.txt"), []byte(sizes.ReplaceAllString(stdout, "N KiB")))

	// The redacted host recording has the same devices as the original.
	copied := filepath.Join(t.TempDir(), "copied.host")
	if err := os.WriteFile(copied, []byte(files["nodes/gpu-node-06/recorded.host"]), 0o600); err != nil {
		t.Fatal(err)
	}
	before := scan.ReadHost(discoverytest.ReadHost(t, filepath.Join(here, recordedHost)), families.All)
	if after := scan.ReadHost(discoverytest.ReadHost(t, copied), families.All); len(after.Devices) != len(before.Devices) {
		t.Errorf("%d devices, %d before", len(after.Devices), len(before.Devices))
	}
	// A device has the same pseudonym in slices, metrics and host recordings.
	uuid := pseudonymIn(files["nodes/gpu-node-06/metrics.txt"])
	for _, name := range []string{"cluster/resourceslices.json", "nodes/gpu-node-06/recorded.host"} {
		if !strings.Contains(files[name], uuid) {
			t.Errorf("%s of the metrics is not in %s", uuid, name)
		}
	}
}

func pseudonymIn(metrics string) string {
	_, rest, _ := strings.Cut(metrics, `"GPU-`)
	uuid, _, _ := strings.Cut(rest, `"`)
	return uuid
}

// With --with-identities, a report contains identities, but no secrets.
func TestReportWithIdentities(t *testing.T) {
	_, client := withAgents(t)
	_, files := report(t, client, 80, "--with-identities", "gpu-node-06")
	if !strings.Contains(files["nodes/gpu-node-06/metrics.txt"], "GPU-5d2c1f52-8a41-4e0b-9c37-0b6f3d9ae452") {
		t.Errorf("metrics: %s", files["nodes/gpu-node-06/metrics.txt"])
	}
	for name, content := range files {
		if strings.Contains(content, secretText) {
			t.Errorf("%s has a secret in it", name)
		}
	}
}

// An anonymous report names neither pods nor namespaces.
func TestAnonymousReport(t *testing.T) {
	_, client := withAgents(t)
	_, files := report(t, client, 80, "--anonymous")
	for name, content := range files {
		for _, word := range []string{"llama-7b-worker-0", "train-42", "mixtral", `"serve"`} {
			if strings.Contains(content, word) {
				t.Errorf("%s names %s", name, word)
			}
		}
	}
	if !strings.Contains(files["cluster/pods.json"], `"pod-`) {
		t.Errorf("pods: %s", files["cluster/pods.json"])
	}
}

// A report of this machine needs no cluster.
func TestReportOfThisNode(t *testing.T) {
	t.Chdir(t.TempDir())
	o := newOptions("v1.2.3")
	r := &reportOptions{options: o, thisNode: true, hostRoot: "/host", local: func(_ context.Context, args ...string) (stdout, stderr []byte, err error) {
		if args[0] == "record" && slices.Contains(args, "/host") {
			return []byte("A host.\n\n-- sys/x/serial_number --\nPCB8273645A\n-- end --\n"), nil, nil
		}
		return nil, []byte("chandler: no doctor\n"), errors.New("exit code 2")
	}}
	var out bytes.Buffer
	cmd := &cobra.Command{}
	cmd.SetOut(&out)
	r.file = "out.tar.gz"
	if err := r.run(t.Context(), cmd, nil); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("out.tar.gz")
	if err != nil {
		t.Fatal(err)
	}
	files := reporttest.UnpackArchive(t, data)
	if host := files["nodes/this/recorded.host"]; host == "" || strings.Contains(host, "PCB8273645A") {
		t.Errorf("recorded host: %q", host)
	}
	if !strings.Contains(out.String(), "doctor: chandler: no doctor") {
		t.Errorf("it does not say what it could not have:\n%s", out.String())
	}
	if err := r.run(t.Context(), cmd, nil); !errors.Is(err, os.ErrExist) {
		t.Errorf("a second report replaces the first: %v", err)
	}
}

// The program for --this-node is in the directory of the plugin or else in the PATH.
func TestNodeProgram(t *testing.T) {
	beside, inPath := t.TempDir(), t.TempDir()
	program := func(dir string) string {
		path := filepath.Join(dir, "chandler")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		return path
	}
	t.Setenv("PATH", inPath)
	if _, err := nodeProgram(beside); err == nil || !strings.Contains(err.Error(), "neither in "+beside+" nor in the PATH") {
		t.Errorf("without the program: %v", err)
	}
	want := program(inPath)
	if got, err := nodeProgram(beside); got != want || err != nil {
		t.Errorf("in the PATH: %q, %v", got, err)
	}
	want = program(beside)
	if got, err := nodeProgram(beside); got != want || err != nil {
		t.Errorf("beside the plugin: %q, %v", got, err)
	}
}
