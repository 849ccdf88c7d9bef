package kubectl

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
)

// measured is an extract of the metrics of the agent of vm-1, with NPUs that a pod has by the
// device plugin API.
const measured = `# TYPE chandler_device_info gauge
chandler_device_info{node="vm-1",device="pci-0000-05-00-0",pci_address="0000:05:00.0",kind="npu",model="Example NPU",parent=""} 1
chandler_device_info{node="vm-1",device="npu-7",pci_address="",kind="npu",model="",parent=""} 1
# TYPE chandler_device_allocated gauge
chandler_device_allocated{node="vm-1",device="pci-0000-05-00-0",namespace="lab",pod="nb-7",container="a",resource="example.com/npu",api="DevicePlugin"} 1
chandler_device_allocated{node="vm-1",device="npu-7",namespace="lab",pod="nb-7",container="a",resource="example.com/npu",api="DevicePlugin"} 1
chandler_device_allocated{node="vm-1",device="npu-8",namespace="lab",pod="other",container="a",resource="example.com/npu",api="DevicePlugin"} 1
chandler_device_allocated{node="vm-1",device="npu-9",namespace="lab",pod="nb-7",container="a",resource="example.com/npu",api="DRA"} 1
# TYPE chandler_devices_waiting gauge
chandler_devices_waiting{family="a"} 1
chandler_devices_waiting{family="b"} 2
`

type refused struct{ error }

func (r refused) DoRaw(context.Context) ([]byte, error)         { return nil, r.error }
func (r refused) Stream(context.Context) (io.ReadCloser, error) { return nil, r.error }

// withAgent returns a client of the example with an agent on vm-1, which always gives the same
// answer.
func withAgent(t *testing.T, answer rest.ResponseWrapper) *fake.Clientset {
	t.Helper()
	client := fake.NewClientset(append(example(t).Objects(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "chandler", Name: "chandler", Labels: map[string]string{"app.kubernetes.io/name": "chandler"},
			OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: "chandler", Controller: new(true)}},
		},
		Spec: corev1.PodSpec{NodeName: "vm-1", Containers: []corev1.Container{{Name: "chandler", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}}}},
	})...)
	client.AddProxyReactor("pods", func(clienttesting.Action) (bool, rest.ResponseWrapper, error) { return true, answer, nil })
	return client
}

// The command who queries the node's agent for the devices that a pod has by the device plugin API.
// If the agent does not answer, who prints the reason.
func TestWhoAsksAgents(t *testing.T) {
	pods := schema.GroupResource{Resource: "pods/proxy"}
	for name, test := range map[string]struct {
		answer rest.ResponseWrapper
		args   []string
		has    []string
		hasNot []string
	}{
		"a node": {
			answer: response(measured), args: []string{"who", "vm-1"},
			has:    []string{"npu 05:00.0", "npu npu-7", "3 devices of this node"},
			hasNot: []string{"×2", "npu-8", "npu-9", "only the node has the name"},
		},
		"a pod": {
			answer: response(measured), args: []string{"who", "lab/nb-7"},
			has: []string{"npu 05:00.0", "npu npu-7"}, hasNot: []string{"×2", "wait"},
		},
		"in JSON": {
			answer: response(measured), args: []string{"who", "lab/nb-7", "-o", "json"},
			has: []string{`"npu-7",`, `"pci-0000-05-00-0"`},
		},
		"no right": {
			answer: refused{apierrors.NewForbidden(pods, "chandler", errors.New("no"))}, args: []string{"who", "vm-1"},
			has: []string{"×2", "the agent of vm-1 does not report the device, because you may not get pods/proxy"},
		},
		"protected": {
			answer: refused{apierrors.NewNotFound(pods, "metrics")}, args: []string{"who", "vm-1"},
			has: []string{"×2", "because its metrics are protected"},
		},
		"an agent that does not have it": {
			answer: response(""), args: []string{"who", "vm-1"},
			has: []string{"×2", "only the node has the name"},
		},
		"a resource without its domain": {
			answer: response(measured), args: []string{"who", "npu"},
			has: []string{"npu 05:00.0", "npu npu-7", "example.com/npu on vm-1: 1 free"},
		},
		"a device by limits": {
			answer: response(measured), args: []string{"who", "pci-0000-05-00-0"},
			has:    []string{"vm-1 lab/nb-7 npu 05:00.0", "Example NPU", "example.com/npu", "plugin 1h"},
			hasNot: []string{"npu-7", "free"},
		},
		"a device by limits that is sick": {
			answer: response(measured + `chandler_device_condition{node="vm-1",device="npu-7",condition="unhealthy",effect="NoSchedule"} 1` + "\n"), args: []string{"who", "device/npu-7", "-o", "json"},
			has: []string{`"condition": "unhealthy"`, `"pod": "nb-7"`},
		},
		"an extended resource that no node has": {
			answer: response(`chandler_device_info{node="vm-1",device="tty",kind="serial"} 1` + "\n"), args: []string{"who", "tty"},
			has: []string{"serial tty on vm-1: not allocated; free."},
		},
		"no metrics": {
			answer: response("<html>"), args: []string{"who", "vm-1"},
			has: []string{"×2", "the agent of vm-1 does not report the device"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			client := withAgent(t, test.answer)
			out, errOut, err := run(t, client, 160, test.args...)
			if err != nil {
				t.Fatalf("%v\n%s", err, errOut)
			}
			text := strings.Join(strings.Fields(out), " ")
			for _, want := range test.has {
				if !strings.Contains(text, want) {
					t.Errorf("no %q in\n%s", want, out)
				}
			}
			for _, not := range test.hasNot {
				if strings.Contains(text, not) {
					t.Errorf("%q in\n%s", not, out)
				}
			}
		})
	}
}

// If a device is not found and agents did not answer, the error of who gives the reason.
func TestWhoWithoutAnswers(t *testing.T) {
	client := withAgent(t, refused{apierrors.NewForbidden(schema.GroupResource{Resource: "pods/proxy"}, "chandler", errors.New("no"))})
	_, _, err := run(t, client, 160, "who", "serial-0")
	if err == nil || !strings.HasSuffix(err.Error(), "the agent of vm-1 did not report it, because you may not get pods/proxy") {
		t.Errorf("error %v", err)
	}
	for _, word := range []string{"pod/serial-0", "node/serial-0"} {
		if _, _, err := run(t, client, 160, "who", word); err == nil || strings.Contains(err.Error(), "agent") {
			t.Errorf("%s: error %v", word, err)
		}
	}
}
