package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/chandler"
)

// hostService is the host service of the node with the mock of the driver.
const hostService = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: chandler-host, namespace: ` + chandler.Namespace + `}
spec:
  selector: {matchLabels: {app: chandler-host}}
  template:
    metadata: {labels: {app: chandler-host}}
    spec:
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 1
      tolerations: [{operator: Exists}]
      containers:
      - name: host-service
        image: ` + chandler.AgentImage + `-host
        imagePullPolicy: Never
        command: [/chandler-host]
        args: [--host-root=/host, --host-service=/run/chandler/host, --serve-nvml, --gpus=/host/proc/driver/nvidia/gpus, --driver-root=/]
        env: [{name: CHANDLER_NVML_MOCKED, value: /kernel}]
        securityContext: {privileged: true}
        terminationMessagePath: /termination-log # its /dev is that of the host
        volumeMounts:
        - {name: sys, mountPath: /host/sys, readOnly: true}
        - {name: proc, mountPath: /host/proc, readOnly: true}
        - {name: dev, mountPath: /host/dev, readOnly: true}
        - {name: dev, mountPath: /dev}
        - {name: kernel, mountPath: /kernel}
        - {name: socket, mountPath: /run/chandler/host}
      volumes:
      - {name: sys, hostPath: {path: ` + migDir + `/sys}}
      - {name: proc, hostPath: {path: ` + migDir + `/proc}}
      - {name: dev, hostPath: {path: ` + migDir + `/dev}}
      - {name: kernel, hostPath: {path: ` + kernelDir + `}}
      - {name: socket, hostPath: {path: /run/chandler/host, type: DirectoryOrCreate}}
`

// testMIGWithoutService ends the host service while a pod has an instance. The next pod must wait for
// the service by name.
func testMIGWithoutService(t *testing.T) {
	kept, late := migPod("kept", "3g.40gb"), migPod("late", "2g.10gb")
	apply(t, kept)
	device := hasInstance(t, "kept")
	patch(t, "chandler-host", "strategic", `{"spec": {"template": {"spec": {"nodeSelector": {"none": "none"}}}}}`)
	until(t, "the service to end", func(ctx context.Context) error {
		pods, err := kube.CoreV1().Pods(chandler.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app=chandler-host"})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d pods", len(pods.Items))
		}
		return err
	})
	if err := opens(device, printed(t, metav1.NamespaceDefault, "kept").nodes("/dev/nvidia")); err != nil {
		t.Errorf("without the service: %v", err)
	}
	apply(t, late)
	until(t, "an Event that names the host service", func(ctx context.Context) error {
		events, err := kube.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=late"})
		if err != nil {
			return err
		}
		var all []string
		for i := range events.Items {
			if strings.Contains(events.Items[i].Message, "host service") {
				return nil
			}
			all = append(all, events.Items[i].Message)
		}
		return fmt.Errorf("there are %q", all)
	})
	remove(t, kept)
	patch(t, "chandler-host", "json", `[{"op": "remove", "path": "/spec/template/spec/nodeSelector"}]`)
	// The kubelet would also retry the first pod, but only after a minute and a half.
	remove(t, late)
	next := migPod("next", "2g.10gb")
	apply(t, next)
	hasInstance(t, "next")
	remove(t, next)
	nothingCut(t)
}

// patch patches a DaemonSet of Chandler's namespace.
func patch(t *testing.T, name, kind, change string) {
	t.Helper()
	if out, err := node.Kubectl(within(t), "patch", "daemonset", "-n", chandler.Namespace, name, "--type="+kind, "--patch", change).CombinedOutput(); err != nil {
		t.Fatalf("patch: %v\n%s", err, out)
	}
}

// tellHostService logs the ends of the logs of the service and the agent.
func tellHostService(t *testing.T) {
	for _, of := range []string{"chandler-host", chandler.DaemonSet} {
		out, err := node.Kubectl(within(t), "logs", "-n", chandler.Namespace, "daemonset/"+of, "--tail=60").CombinedOutput()
		t.Logf("%s: %v\n%s", of, err, out)
	}
}
