package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/kubectl"
)

// dryRun keeps a successful attack from doing harm. Admission policies apply to dry runs too.
var dryRun = []string{metav1.DryRunAll}

// otherDriver is another driver on the same node.
const otherDriver = "gpu.example.com"

// thief returns a client with a token of the agent, like an attacker who controls the agent's pod.
// The token is bound to the pod and names the pod's node.
func thief(t *testing.T) *kubectl.Client {
	t.Helper()
	pod, err := chandler.AgentPod(within(t), kube)
	if err != nil {
		t.Fatal(err)
	}
	request, err := kube.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(within(t), pod.Spec.ServiceAccountName, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{
			BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(node.RESTConfig())
	config.BearerToken, config.QPS = request.Status.Token, -1
	client, err := kubectl.New(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// TestAgentHasNoOtherPermissions compares the agent's permissions with those of an unprivileged service
// account. The only additional permissions come from the ClusterRole in rbac.yaml and the Role in
// the agents' own namespace.
func TestAgentHasNoOtherPermissions(t *testing.T) {
	agent := thief(t)
	everybody := rest.CopyConfig(node.RESTConfig())
	everybody.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:default:default"}
	nobody, err := kubernetes.NewForConfig(everybody)
	if err != nil {
		t.Fatal(err)
	}
	role, err := kube.RbacV1().ClusterRoles().Get(within(t), "chandler", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	own, err := kube.RbacV1().Roles(chandler.Namespace).Get(within(t), "chandler", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, namespace := range []string{metav1.NamespaceDefault, chandler.Namespace, metav1.NamespaceSystem} {
		granted := rights(t, nobody, namespace)
		rules := role.Rules
		if namespace == chandler.Namespace {
			rules = slices.Concat(rules, own.Rules)
		}
		for _, rule := range rules {
			granted[right(rule.Verbs, rule.APIGroups, rule.Resources, rule.ResourceNames)] = true
		}
		for has := range rights(t, agent, namespace) {
			if !granted[has] {
				t.Errorf("in namespace %s the agent may %s", namespace, has)
			}
		}
	}
}

// rights returns the client's permissions in a namespace, as the API server lists them.
func rights(t *testing.T, client kubernetes.Interface, namespace string) map[string]bool {
	t.Helper()
	review, err := client.AuthorizationV1().SelfSubjectRulesReviews().Create(within(t), &authorizationv1.SelfSubjectRulesReview{
		Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: namespace},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	has := make(map[string]bool)
	for _, rule := range review.Status.ResourceRules {
		has[right(rule.Verbs, rule.APIGroups, rule.Resources, rule.ResourceNames)] = true
	}
	for _, rule := range review.Status.NonResourceRules {
		has[fmt.Sprint(rule.Verbs, rule.NonResourceURLs)] = true
	}
	return has
}

func right(verbs, groups, resources, names []string) string {
	return fmt.Sprint(verbs, groups, resources, names)
}

// TestAttackByPermissions makes requests that the agent does not need. RBAC must refuse each request.
func TestAttackByPermissions(t *testing.T) {
	agent := thief(t)
	own := node.NodeName()
	patch := []byte(`{"metadata": {"labels": {"attacked": "true"}}}`)
	merge, options := types.MergePatchType, metav1.PatchOptions{DryRun: dryRun}
	create, remove := metav1.CreateOptions{DryRun: dryRun}, metav1.DeleteOptions{DryRun: dryRun}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "attack"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	meta := metav1.ObjectMeta{Name: "attack"}

	attacks := map[string]func(ctx context.Context) error{
		"read all Secrets": func(ctx context.Context) error {
			_, err := agent.CoreV1().Secrets("").List(ctx, metav1.ListOptions{})
			return err
		},
		"read Secrets of its namespace": func(ctx context.Context) error {
			_, err := agent.CoreV1().Secrets(chandler.Namespace).List(ctx, metav1.ListOptions{})
			return err
		},
		"read ConfigMaps": func(ctx context.Context) error {
			_, err := agent.CoreV1().ConfigMaps("kube-system").List(ctx, metav1.ListOptions{})
			return err
		},
		"change its own configuration": func(ctx context.Context) error {
			_, err := agent.CoreV1().ConfigMaps(chandler.Namespace).Patch(ctx, "chandler", merge, patch, options)
			return err
		},
		"create a pod": func(ctx context.Context) error {
			_, err := agent.CoreV1().Pods(chandler.Namespace).Create(ctx, pod, create)
			return err
		},
		"delete a pod": func(ctx context.Context) error {
			return agent.CoreV1().Pods(metav1.NamespaceDefault).Delete(ctx, "any", remove)
		},
		"change a pod's status": func(ctx context.Context) error {
			_, err := agent.CoreV1().Pods(metav1.NamespaceDefault).Patch(ctx, "any", merge, patch, options, "status")
			return err
		},
		"enter a pod": func(ctx context.Context) error {
			return agent.CoreV1().RESTClient().Post().Namespace(metav1.NamespaceDefault).Resource("pods").Name("any").SubResource("exec").Param("command", "sh").Do(ctx).Error()
		},
		"read a pod's log": func(ctx context.Context) error {
			return agent.CoreV1().RESTClient().Get().Namespace(metav1.NamespaceDefault).Resource("pods").Name("any").SubResource("log").Do(ctx).Error()
		},
		"label its node": func(ctx context.Context) error {
			_, err := agent.CoreV1().Nodes().Patch(ctx, own, merge, patch, options)
			return err
		},
		"change its node's status": func(ctx context.Context) error {
			_, err := agent.CoreV1().Nodes().Patch(ctx, own, merge, []byte(`{"status": {"allocatable": {"cpu": "1000"}}}`), options, "status")
			return err
		},
		"delete its node": func(ctx context.Context) error { return agent.CoreV1().Nodes().Delete(ctx, own, remove) },
		"reach the kubelet through the API server": func(ctx context.Context) error {
			return agent.CoreV1().RESTClient().Get().Resource("nodes").Name(own).SubResource("proxy").Suffix("pods").Do(ctx).Error()
		},
		"get a token of another service account": func(ctx context.Context) error {
			_, err := agent.CoreV1().ServiceAccounts("kube-system").CreateToken(ctx, "generic-garbage-collector", &authenticationv1.TokenRequest{}, create)
			return err
		},
		"get a token of its own that names no pod": func(ctx context.Context) error {
			_, err := agent.CoreV1().ServiceAccounts(chandler.Namespace).CreateToken(ctx, "chandler", &authenticationv1.TokenRequest{}, create)
			return err
		},
		"be another user": func(ctx context.Context) error {
			return agent.CoreV1().RESTClient().Get().AbsPath("/api/v1/nodes").SetHeader("Impersonate-User", "admin").Do(ctx).Error()
		},
		"be the agent of another node": func(ctx context.Context) error {
			return agent.CoreV1().RESTClient().Get().AbsPath("/api/v1/nodes").SetHeader("Impersonate-User", "system:serviceaccount:chandler:chandler").
				SetHeader("Impersonate-Extra-Authentication.kubernetes.io%2fnode-Name", "other").Do(ctx).Error()
		},
		"give itself rights": func(ctx context.Context) error {
			return agent.Apply(ctx, "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRoleBinding\nmetadata: {name: attack}\n"+
				"roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}\nsubjects: [{kind: ServiceAccount, name: chandler, namespace: chandler}]\n")
		},
		"change its ClusterRole": func(ctx context.Context) error {
			_, err := agent.RbacV1().ClusterRoles().Patch(ctx, "chandler", merge, patch, options)
			return err
		},
		"change its DaemonSet": func(ctx context.Context) error {
			_, err := agent.AppsV1().DaemonSets(chandler.Namespace).Patch(ctx, "chandler", merge, patch, options)
			return err
		},
		"relabel its namespace": func(ctx context.Context) error {
			_, err := agent.CoreV1().Namespaces().Patch(ctx, chandler.Namespace, merge, patch, options)
			return err
		},
		"unbind the policy that keeps it": func(ctx context.Context) error {
			return agent.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Delete(ctx, "claims.chandler.dev", remove)
		},
		"change a policy": func(ctx context.Context) error {
			_, err := agent.AdmissionregistrationV1().ValidatingAdmissionPolicies().Patch(ctx, "slices.chandler.dev", merge, patch, options)
			return err
		},
		"create a DeviceClass": func(ctx context.Context) error {
			_, err := agent.ResourceV1().DeviceClasses().Create(ctx, &resourceapi.DeviceClass{ObjectMeta: meta}, create)
			return err
		},
		"delete a DeviceClass": func(ctx context.Context) error {
			return agent.ResourceV1().DeviceClasses().Delete(ctx, "gpu.chandler.dev", remove)
		},
		"create a ResourceClaim": func(ctx context.Context) error {
			_, err := agent.ResourceV1().ResourceClaims(metav1.NamespaceDefault).Create(ctx, &resourceapi.ResourceClaim{ObjectMeta: meta}, create)
			return err
		},
		"change a ResourceClaim": func(ctx context.Context) error {
			_, err := agent.ResourceV1().ResourceClaims(metav1.NamespaceDefault).Patch(ctx, "any", merge, patch, options)
			return err
		},
		"delete a ResourceClaim": func(ctx context.Context) error {
			return agent.ResourceV1().ResourceClaims(metav1.NamespaceDefault).Delete(ctx, "any", remove)
		},
		"replace a ResourceClaim's status": func(ctx context.Context) error {
			_, err := agent.ResourceV1().ResourceClaims(metav1.NamespaceDefault).UpdateStatus(ctx, &resourceapi.ResourceClaim{ObjectMeta: meta}, metav1.UpdateOptions{DryRun: dryRun})
			return err
		},
		"delete all ResourceSlices": func(ctx context.Context) error {
			return agent.ResourceV1().ResourceSlices().DeleteCollection(ctx, remove, metav1.ListOptions{})
		},
		"taint devices": func(ctx context.Context) error {
			return agent.CoreV1().RESTClient().Post().AbsPath("/apis/resource.k8s.io/v1alpha3/devicetaintrules").Param("dryRun", "All").
				Body([]byte(`{"apiVersion": "resource.k8s.io/v1alpha3", "kind": "DeviceTaintRule", "metadata": {"name": "attack"}}`)).SetHeader("Content-Type", "application/json").Do(ctx).Error()
		},
		"change an Event": func(ctx context.Context) error {
			_, err := agent.EventsV1().Events(metav1.NamespaceDefault).Patch(ctx, "any", merge, patch, options)
			return err
		},
		"create an Event of the core API": func(ctx context.Context) error {
			_, err := agent.CoreV1().Events(metav1.NamespaceDefault).Create(ctx, &corev1.Event{ObjectMeta: meta}, create)
			return err
		},
		"take over a lease": func(ctx context.Context) error {
			_, err := agent.CoordinationV1().Leases("kube-system").Patch(ctx, "kube-scheduler", merge, patch, options)
			return err
		},
		"ask for a certificate": func(ctx context.Context) error {
			return agent.Apply(ctx, "apiVersion: certificates.k8s.io/v1\nkind: CertificateSigningRequest\nmetadata: {name: attack}\n"+
				"spec: {request: YQ==, signerName: kubernetes.io/kube-apiserver-client, usages: [client auth]}\n")
		},
	}
	for name, attack := range attacks {
		t.Run(name, func(t *testing.T) {
			if err := attack(within(t)); !apierrors.IsForbidden(err) {
				t.Errorf("the answer is %v; want that it is forbidden", err)
			}
		})
	}
}

// TestAttackByEvents creates Events with the agent's token. They are only allowed as Chandler on
// the agent's own node, and about pods.
func TestAttackByEvents(t *testing.T) {
	agent := thief(t)
	own := node.NodeName()
	tests := map[string]struct {
		change func(*eventsv1.Event)
		want   string
	}{
		"its own":             {func(*eventsv1.Event) {}, ""},
		"as the kubelet":      {func(e *eventsv1.Event) { e.ReportingController = "kubelet" }, "only report as chandler.dev"},
		"as another node":     {func(e *eventsv1.Event) { e.ReportingInstance = "other" }, "only report as chandler.dev"},
		"as part of its name": {func(e *eventsv1.Event) { e.ReportingInstance = own[:1] }, "only report as chandler.dev"},
		"about a node": {func(e *eventsv1.Event) {
			e.Regarding = corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: own}
		}, "only report about pods"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			event := &eventsv1.Event{
				ObjectMeta: metav1.ObjectMeta{Name: "attack", Namespace: metav1.NamespaceDefault}, EventTime: metav1.NowMicro(),
				ReportingController: chandler.Driver, ReportingInstance: own, Action: "Attack", Reason: "Attack", Type: corev1.EventTypeNormal,
				Regarding: corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: metav1.NamespaceDefault, Name: "any"},
			}
			test.change(event)
			_, err := agent.EventsV1().Events(metav1.NamespaceDefault).Create(within(t), event, metav1.CreateOptions{DryRun: dryRun})
			refusedWith(t, err, test.want)
		})
	}
}

// TestAttackByClaims patches the status of claims with the agent's token. The agent may only write
// entries of its own devices. This also holds for API servers before Kubernetes 1.36, which require
// no further permissions.
func TestAttackByClaims(t *testing.T) {
	agent := thief(t)
	own := node.NodeName()
	claim(t, "attack-own", own, result{chandler.Driver, own, "gpu"})
	claim(t, "attack-other-pool", own, result{chandler.Driver, own + "/other", "nic"})
	claim(t, "attack-third-pool", own, result{chandler.Driver, own + "/third", "nic"})
	claim(t, "attack-two-pools", own, result{chandler.Driver, own, "gpu"}, result{chandler.Driver, own + "/third", "nic"})
	claim(t, "attack-others", "other", result{chandler.Driver, "other", "gpu"})
	claim(t, "attack-driver", own, result{otherDriver, own, "gpu"})
	claim(t, "attack-mixed", own, result{chandler.Driver, own, "gpu"}, result{otherDriver, own, "gpu"})
	claim(t, "attack-free", "")
	patchStatus(t, kube, "attack-mixed", entries(result{otherDriver, own, "gpu"}))

	allocation := `{"allocation": {"devices": {"results": [{"request": "r0", "driver": %q, "pool": %q, "device": %q}]}}}`
	attacks := map[string]struct{ claim, status, want string }{
		"say how its device is":                 {"attack-own", entries(result{chandler.Driver, own, "gpu"}), ""},
		"say how a device of its other pool is": {"attack-other-pool", entries(result{chandler.Driver, own + "/other", "nic"}), ""},
		"speak of a third pool":                 {"attack-third-pool", entries(result{chandler.Driver, own + "/third", "nic"}), "claims that have devices of that node"},
		"speak of a third pool beside its own":  {"attack-two-pools", entries(result{chandler.Driver, own, "gpu"}, result{chandler.Driver, own + "/third", "nic"}), "devices of that node and of driver chandler.dev"},
		"say so beside another driver":          {"attack-mixed", entries(result{chandler.Driver, own, "gpu"}, result{otherDriver, own, "gpu"}), ""},
		"take another device":                   {"attack-own", fmt.Sprintf(allocation, chandler.Driver, own, "another"), "status.allocation: Invalid value"},
		"give its device back":                  {"attack-own", `{"allocation": null}`, "may not change what is allocated"},
		"move a claim to its node":              {"attack-others", fmt.Sprintf(allocation, chandler.Driver, own, "gpu"), "status.allocation: Invalid value"},
		"take a claim from another node":        {"attack-others", `{"allocation": null}`, "may not change what is allocated"},
		"allocate a claim":                      {"attack-free", fmt.Sprintf(allocation, chandler.Driver, own, "gpu"), "may not change what is allocated"},
		"reserve a claim":                       {"attack-own", `{"reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}]}`, "may not change what is allocated"},
		"speak of another node's device":        {"attack-others", entries(result{chandler.Driver, "other", "gpu"}), "claims that have devices of that node"},
		"speak of another driver's device":      {"attack-driver", entries(result{otherDriver, own, "gpu"}), "claims that have devices of that node"},
		"forget what another driver said":       {"attack-mixed", `{"devices": null}`, "devices of that node and of driver chandler.dev"},
		"replace what another driver said":      {"attack-mixed", entries(result{chandler.Driver, own, "gpu"}), "devices of that node and of driver chandler.dev"},
		"change what another driver said of it": {"attack-mixed", `{"devices": [{"driver": "` + otherDriver + `", "pool": "` + own + `", "device": "gpu", "data": {"a": 1}}]}`, "devices of that node and of driver chandler.dev"},
	}
	try := func(t *testing.T, byPolicy bool) {
		for name, attack := range attacks {
			t.Run(name, func(t *testing.T) {
				_, err := agent.ResourceV1().ResourceClaims(metav1.NamespaceDefault).Patch(within(t), attack.claim, types.MergePatchType,
					[]byte(`{"status": `+attack.status+`}`), metav1.PatchOptions{DryRun: dryRun}, "status")
				if byPolicy || attack.want == "" {
					refusedWith(t, err, attack.want)
				} else if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
					t.Errorf("the answer is %v; want a refusal", err)
				}
			})
		}
	}
	t.Run("as installed", func(t *testing.T) { try(t, false) })
	// Every API server before 1.36 allows these requests to all clients that may patch a status.
	apply(t, everyStatus)
	until(t, "the rights to be in force", func(ctx context.Context) error {
		allowed := rights(t, agent, metav1.NamespaceDefault)
		if !allowed[right([]string{"patch"}, []string{"resource.k8s.io"}, []string{"resourceclaims/binding"}, nil)] {
			return errors.New("they are not")
		}
		return nil
	})
	t.Run("without granular authorization", func(t *testing.T) { try(t, true) })
}

// everyStatus gives the agent the permissions by which it could write the whole status of any claim
// in Kubernetes 1.36.
const everyStatus = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: attack}
rules:
- {apiGroups: [resource.k8s.io], resources: [resourceclaims/binding], verbs: [patch]}
- {apiGroups: [resource.k8s.io], resources: [resourceclaims/driver], verbs: ["arbitrary-node:patch"]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: attack}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: attack}
subjects: [{kind: ServiceAccount, name: chandler, namespace: chandler}]
`

// A result is an allocated device.
type result struct{ driver, pool, device string }

// claim creates a claim with devices that are allocated on a node. Without a node name, the claim
// stays unallocated.
func claim(t *testing.T, name, nodeName string, results ...result) {
	t.Helper()
	object := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for i := range max(len(results), 1) {
		object.Spec.Devices.Requests = append(object.Spec.Devices.Requests, resourceapi.DeviceRequest{
			Name: fmt.Sprintf("r%d", i), Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "none"},
		})
	}
	claims := kube.ResourceV1().ResourceClaims(metav1.NamespaceDefault)
	created, err := claims.Create(within(t), object, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := claims.Delete(within(t), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	if nodeName == "" {
		return
	}
	created.Status.Allocation = &resourceapi.AllocationResult{NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{nodeName}}},
	}}}}
	for i, r := range results {
		created.Status.Allocation.Devices.Results = append(created.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: fmt.Sprintf("r%d", i), Driver: r.driver, Pool: r.pool, Device: r.device,
		})
	}
	if _, err := claims.UpdateStatus(within(t), created, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// entries returns a status with an entry for each device.
func entries(of ...result) string {
	var said []string
	for _, r := range of {
		said = append(said, fmt.Sprintf(`{"driver": %q, "pool": %q, "device": %q}`, r.driver, r.pool, r.device))
	}
	return `{"devices": [` + strings.Join(said, ", ") + `]}`
}

func patchStatus(t *testing.T, client kubernetes.Interface, name, status string) {
	t.Helper()
	_, err := client.ResourceV1().ResourceClaims(metav1.NamespaceDefault).Patch(within(t), name, types.MergePatchType,
		[]byte(`{"status": `+status+`}`), metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatal(err)
	}
}

// refusedWith expects a refusal with the given reason, or success if want is "".
func refusedWith(t *testing.T, err error, want string) {
	t.Helper()
	if want == "" && err != nil {
		t.Error(err)
	}
	if want != "" && (!apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), want)) {
		t.Errorf("the answer is %v; want one that says %q", err, want)
	}
}

// TestAttackByPods patches the status of pods with the agent's token. The agent may only patch its
// own pod.
func TestAttackByPods(t *testing.T) {
	agent := thief(t)
	own, err := chandler.AgentPod(within(t), kube)
	if err != nil {
		t.Fatal(err)
	}
	bystander := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "attack-bystander", Namespace: chandler.Namespace}}
	bystander.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/never"}}
	bystander.Spec.Containers = []corev1.Container{{Name: "none", Image: "none"}}
	pods := kube.CoreV1().Pods(chandler.Namespace)
	if _, err := pods.Create(within(t), bystander, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := pods.Delete(context.WithoutCancel(t.Context()), bystander.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	for name, want := range map[string]string{own.Name: "", bystander.Name: "may only say how that pod is"} {
		patch := []byte(`{"status": {"conditions": [{"type": "chandler.dev/Removal", "status": "True", "reason": "Removed"}]}}`)
		_, err := agent.CoreV1().Pods(chandler.Namespace).Patch(within(t), name, types.StrategicMergePatchType, patch, metav1.PatchOptions{DryRun: dryRun}, "status")
		refusedWith(t, err, want)
	}
}
