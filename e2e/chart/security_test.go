package chart

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

// networkPolicy returns the chart's NetworkPolicy for values.
func networkPolicy(t *testing.T, values string) networkingv1.NetworkPolicySpec {
	t.Helper()
	var policy networkingv1.NetworkPolicy
	decode(t, mustRender(t, values, "--show-only=templates/network-policy.yaml"), &policy)
	return policy.Spec
}

// TestNetworkPolicy expects the policy to allow only connections to the ports of health and
// metrics. Values can restrict the sources of these connections, and the agent's own connections.
func TestNetworkPolicy(t *testing.T) {
	plain := networkPolicy(t, "")
	agent := daemonSet(t, "").Spec.Template
	for name, value := range plain.PodSelector.MatchLabels {
		if agent.Labels[name] != value {
			t.Errorf("it is for pods with %s=%s, and the agent's have %v", name, value, agent.Labels)
		}
	}
	if !cmp.Equal(plain.PolicyTypes, []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}) || len(plain.Ingress) == 0 || plain.Egress != nil {
		t.Errorf("by default: %+v", plain)
	}
	ports := make(map[string]bool)
	for _, rule := range plain.Ingress {
		for _, port := range rule.Ports {
			ports[port.Port.StrVal] = true
		}
	}
	for _, port := range agent.Spec.Containers[0].Ports {
		if !ports[port.Name] {
			t.Errorf("port %s cannot be reached", port.Name)
		}
	}
	if len(ports) != len(agent.Spec.Containers[0].Ports) {
		t.Errorf("ports %v can be reached, and the agent's are %v", ports, agent.Spec.Containers[0].Ports)
	}

	if protected := networkPolicy(t, "metrics: {protected: {enabled: true}}"); protected.Ingress[0].Ports[1].Port.StrVal != "metrics" {
		t.Errorf("protected metrics cannot be reached: %+v", protected)
	}
	narrow := networkPolicy(t, `
networkPolicy:
  metricsFrom: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]
  apiServer: [{to: [{ipBlock: {cidr: 10.0.0.1/32}}], ports: [{protocol: TCP, port: 6443}]}]
`)
	from := narrow.Ingress[0].From
	if len(from) != 1 || from[0].NamespaceSelector.MatchLabels["kubernetes.io/metadata.name"] != "monitoring" {
		t.Errorf("from %+v", from)
	}
	want := []networkingv1.NetworkPolicyEgressRule{{
		To:    []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "10.0.0.1/32"}}},
		Ports: []networkingv1.NetworkPolicyPort{{Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To(intstr.FromInt32(6443))}},
	}}
	if diff := cmp.Diff(want, narrow.Egress); diff != "" || len(narrow.PolicyTypes) != 2 {
		t.Errorf("policy types %v, egress (-want +got):\n%s", narrow.PolicyTypes, diff)
	}
	if rules := networkPolicy(t, "webUI: {bindAddress: 'localhost:9001'}\nnetworkPolicy: {webUIFrom: [{podSelector: {}}]}").Ingress; len(rules) != 1 {
		t.Errorf("a page on localhost can be reached: %+v", rules)
	}
	if rules := networkPolicy(t, "webUI: {bindAddress: ':9001'}").Ingress; len(rules) != 1 {
		t.Errorf("every pod can reach the web UI: %+v", rules)
	}
	paged := networkPolicy(t, "webUI: {bindAddress: ':9001'}\nnetworkPolicy: {webUIFrom: [{podSelector: {matchLabels: {a: b}}}]}").Ingress
	if len(paged) != 2 || paged[1].Ports[0].Port.StrVal != "web-ui" || paged[1].From[0].PodSelector.MatchLabels["a"] != "b" {
		t.Errorf("the page cannot be reached: %+v", paged)
	}
	if out, err := render(t, "networkPolicy: {enabled: false}", "--show-only=templates/network-policy.yaml"); err == nil {
		t.Errorf("there is one all the same:\n%s", out)
	}
}

// TestNetworkPolicyOfTraces restricts the agent's connections to the API server. An agent with an
// endpoint for traces must still be allowed to connect to the endpoint.
func TestNetworkPolicyOfTraces(t *testing.T) {
	const narrow = "\nnetworkPolicy: {apiServer: [{to: [{ipBlock: {cidr: 10.0.0.1/32}}]}], tracesTo: [{namespaceSelector: {}}]}"
	for endpoint, port := range map[string]int32{"http://otel.monitoring:4318/v1": 4318, "https://otel": 4317, "": 0} {
		rules := networkPolicy(t, "traces: {endpoint: '"+endpoint+"'}"+narrow).Egress
		if port == 0 {
			if len(rules) != 1 {
				t.Errorf("without traces: %+v", rules)
			}
			continue
		}
		if len(rules) != 3 || rules[1].Ports[0].Port.IntVal != port || len(rules[1].To) != 1 || rules[2].Ports[0].Port.IntVal != 53 {
			t.Errorf("%s: %+v", endpoint, rules)
		}
	}
	if rules := networkPolicy(t, "traces: {endpoint: 'http://otel:4317'}").Egress; rules != nil {
		t.Errorf("traces restrict the agent: %+v", rules)
	}
}

// TestProtectedMetrics expects protected metrics to have a separate port, and the agent to have
// permission to review tokens. Without protected metrics, the agent must not have this permission.
func TestProtectedMetrics(t *testing.T) {
	const values = "metrics: {protected: {enabled: true, port: 9443, secret: tls}}"
	pod := daemonSet(t, values).Spec.Template.Spec
	container := pod.Containers[0]
	args := strings.Join(container.Args, " ")
	for _, arg := range []string{"--healthz-bind-address=:8080", "--metrics-bind-address=:9443", "--metrics-tls-cert-file=/etc/chandler-metrics/tls.crt", "--metrics-tls-key-file=/etc/chandler-metrics/tls.key"} {
		if !strings.Contains(args, arg) {
			t.Errorf("no %s among %q", arg, container.Args)
		}
	}
	if port := container.Ports[1]; port.Name != "metrics" || port.ContainerPort != 9443 {
		t.Errorf("ports %+v", container.Ports)
	}
	if probe := container.LivenessProbe.HTTPGet.Port.StrVal; probe != "http" {
		t.Errorf("probes go to port %s", probe)
	}
	if volume := pod.Volumes[len(pod.Volumes)-1]; volume.Secret == nil || volume.Secret.SecretName != "tls" {
		t.Errorf("volume %+v", volume)
	}
	for rights, with := range map[string]bool{mustRender(t, values, "--show-only=templates/rbac.yaml"): true, mustRender(t, "", "--show-only=templates/rbac.yaml"): false} {
		for _, word := range []string{"tokenreviews", "subjectaccessreviews", "chandler-metrics-reader"} {
			if strings.Contains(rights, word) != with {
				t.Errorf("protected: %t; %s in\n%s", with, word, rights)
			}
		}
	}
}

// TestPodIsConfined expects the agent's pod to have only the access to the host and the cluster
// that it needs, with the default values and with everything switched on.
func TestPodIsConfined(t *testing.T) {
	if set := daemonSet(t, "seLinux: {type: \"\"}"); set.Spec.Template.Spec.Containers[0].SecurityContext.SELinuxOptions != nil {
		t.Error("without a type there are SELinux options")
	}
	for name, on := range map[string]string{"by default": "", "with everything": strings.Join(switches(t), ",") + ",nvidiaDriver.root=/"} {
		set := &appsv1.DaemonSet{}
		decode(t, mustRender(t, "", "--show-only=templates/daemonset.yaml", "--set="+on), set)
		pod := set.Spec.Template.Spec
		security := pod.Containers[0].SecurityContext
		if security.SELinuxOptions.Type != "container_device_plugin_t" || *security.AllowPrivilegeEscalation || !*security.ReadOnlyRootFilesystem ||
			!cmp.Equal(security.Capabilities.Drop, []corev1.Capability{"ALL"}) || len(security.Capabilities.Add) > 0 || security.Privileged != nil {
			t.Errorf("%s: security context %+v", name, security)
		}
		if pod.HostNetwork || pod.HostPID || pod.HostIPC {
			t.Errorf("%s: it is in a namespace of the host", name)
		}
		for path, isWritable := range mountsOf(&pod) {
			if isWritable && strings.HasPrefix(path, "/host") || path == "/dev" {
				t.Errorf("%s: %s is mounted, writable: %v", name, path, isWritable)
			}
		}
		if !*pod.AutomountServiceAccountToken {
			t.Errorf("%s: the agent has no token", name)
		}
	}
	var account corev1.ServiceAccount
	first, _, _ := strings.Cut(strings.TrimPrefix(mustRender(t, "", "--show-only=templates/rbac.yaml"), "---\n"), "\n---\n")
	decode(t, first, &account)
	if *account.AutomountServiceAccountToken {
		t.Error("any pod with the account gets its token")
	}
}

// switches returns the assignments that enable everything that a value can enable.
func switches(t *testing.T) (set []string) {
	for name := range leaves(defaultValues(t), "") {
		if strings.HasSuffix(name, ".enabled") {
			set = append(set, name+"=true")
		}
	}
	if len(set) < 10 {
		t.Fatalf("%q", set)
	}
	return set
}
