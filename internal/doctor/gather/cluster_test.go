package gather

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"

	"chandler.dev/internal/apitest"
	"chandler.dev/internal/apitest/older"
	"chandler.dev/internal/doctor"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
)

// server is a fake API server that tests can configure.
type server struct {
	objects []runtime.Object
	without bool              // do not serve resource.k8s.io
	older   string            // the only version of resource.k8s.io served; "" for v1
	denied  map[string]string // denied requests, by verb and resource: "agent" or "self"
	user    string            // the user of the requests
	only    []codes.Category  // as in [Options]
	all     bool              // [Options.AllNodes]

	requests []clienttesting.Action // set by facts
}

func newServer() *server {
	s := &server{user: "system:node:n", denied: map[string]string{}}
	s.objects = []runtime.Object{
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{KubeletVersion: "v1.37.0", ContainerRuntimeVersion: "containerd://2.1.4"}}},
		&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "chandler", Name: "chandler-x", Labels: map[string]string{"app.kubernetes.io/name": "chandler"}},
			Spec:       corev1.PodSpec{NodeName: "n", ServiceAccountName: "chandler", Volumes: pluginVolume},
			Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
		},
		&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "other-abcde"}, Spec: corev1.PodSpec{NodeName: "n", Volumes: pluginVolume}},
		&resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu.chandler.dev"}, Spec: class(`device.driver == "chandler.dev"`)},
	}
	for _, name := range Policies {
		s.objects = append(s.objects, &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	return s
}

var pluginVolume = []corev1.Volume{{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/device-plugins"}}}}

func class(expression string) resourceapi.DeviceClassSpec {
	return resourceapi.DeviceClassSpec{ExtendedResourceName: new("amd.com/gpu"), Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}}
}

// drop removes the objects with a name.
func (s *server) drop(name string) {
	s.objects = slices.DeleteFunc(s.objects, func(o runtime.Object) bool { return o.(metav1.Object).GetName() == name })
}

// facts gathers the facts from the server as the agent of node n.
func (s *server) facts() *doctor.Facts {
	client := fake.NewClientset(s.objects...)
	switch {
	case s.older != "":
		var err error
		if client, err = older.Client(context.Background(), s.older, s.objects...); err != nil {
			panic(err)
		}
	case !s.without:
		client.Resources = []*metav1.APIResourceList{{GroupVersion: "resource.k8s.io/v1", APIResources: []metav1.APIResource{{Name: "resourceslices"}}}}
	}
	client.PrependReactor("*", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		switch create, _ := action.(clienttesting.CreateAction); action.GetResource().Resource {
		case "selfsubjectreviews":
			review := create.GetObject().(*authenticationv1.SelfSubjectReview).DeepCopy()
			review.Status.UserInfo.Username = s.user
			return true, review, nil
		case "selfsubjectaccessreviews":
			review := create.GetObject().(*authorizationv1.SelfSubjectAccessReview).DeepCopy()
			review.Status.Allowed = !s.denies(review.Spec.ResourceAttributes)
			return true, review, nil
		case "subjectaccessreviews":
			review := create.GetObject().(*authorizationv1.SubjectAccessReview).DeepCopy()
			review.Status.Allowed = !s.denies(review.Spec.ResourceAttributes)
			return true, review, nil
		}
		if s.denied[action.GetVerb()+" "+action.GetResource().Resource] == "self" {
			if list, ok := action.(clienttesting.ListAction); ok && !list.GetListRestrictions().Fields.Empty() {
				return false, nil, nil // slices of the kubelet's own node are permitted
			}
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: action.GetResource().Resource}, "", nil)
		}
		return false, nil, nil
	})
	f := &doctor.Facts{Head: report.Head{Node: "n", Version: "v1", Time: time.Now()}}
	queryServer(context.Background(), Options{Node: "n", PluginDir: "/var/lib/kubelet/device-plugins/", Only: s.only, AllNodes: s.all}, client, f)
	s.requests = client.Actions()
	return f
}

// The API server gets only the requests that the chosen categories need.
func TestRequestsOfCategories(t *testing.T) {
	for only, want := range map[codes.Category]string{
		codes.Devices: "get version, get nodes",
		codes.Host:    "get version, get nodes",
		codes.Runtime: "get version, get nodes",
		codes.Kubelet: "get version, get nodes, list pods of n",
		codes.Agent:   "get version, get nodes, list pods of n",
		codes.APIs:    "get version, get resource, list resourceslices of n, get nodes",
	} {
		s := newServer()
		s.only = []codes.Category{only}
		s.facts()
		var got []string
		for _, request := range s.requests {
			text := request.GetVerb() + " " + request.GetResource().Resource
			if list, ok := request.(clienttesting.ListAction); ok {
				_, node, _ := strings.Cut(list.GetListRestrictions().Fields.String(), "=")
				text += " of " + node
			}
			got = append(got, text)
		}
		if text := strings.Join(got, ", "); text != want {
			t.Errorf("%s: requests %s; want %s", only, text, want)
		}
	}
}

// Without [Options.AllNodes], no list grows with the cluster: the slices are those of the node, and the
// claims those of its pods. With it, all slices and claims are listed.
func TestNoListOfTheCluster(t *testing.T) {
	for all, want := range map[bool]struct{ claims, lists []string }{
		false: {[]string{"named", "made", "extended"}, []string{"pods of n", "resourceslices of n", "deviceclasses of "}},
		true:  {[]string{"named", "made", "extended", "elsewhere"}, []string{"pods of n", "resourceslices of ", "deviceclasses of ", "resourceclaims of "}},
	} {
		s := newServer()
		s.all = all
		for _, name := range []string{"named", "made", "extended", "elsewhere"} {
			s.objects = append(s.objects, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name}})
		}
		s.objects = append(s.objects, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: "train"},
			Spec: corev1.PodSpec{NodeName: "n", ResourceClaims: []corev1.PodResourceClaim{
				{Name: "a", ResourceClaimName: new("named")}, {Name: "b", ResourceClaimTemplateName: new("template")}, {Name: "c", ResourceClaimName: new("gone")},
			}},
			Status: corev1.PodStatus{
				ResourceClaimStatuses:       []corev1.PodResourceClaimStatus{{Name: "b", ResourceClaimName: new("made")}},
				ExtendedResourceClaimStatus: &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "extended"},
			},
		})
		f := s.facts()
		var claims, lists []string
		for _, claim := range f.Cluster.Claims.Value {
			claims = append(claims, claim.Name)
		}
		for _, request := range s.requests {
			if list, ok := request.(clienttesting.ListAction); ok {
				_, node, _ := strings.Cut(list.GetListRestrictions().Fields.String(), "=")
				lists = append(lists, request.GetResource().Resource+" of "+node)
			}
		}
		for _, names := range [][]string{claims, lists, want.claims, want.lists} {
			slices.Sort(names)
		}
		if !slices.Equal(claims, want.claims) || !slices.Equal(lists, want.lists) || (f.Cluster.OwnOnly == "") != all {
			t.Errorf("all nodes %t: claims %q and lists %q, want %q and %q; not judged because %q", all, claims, lists, want.claims, want.lists, f.Cluster.OwnOnly)
		}
	}
}

func (s *server) denies(a *authorizationv1.ResourceAttributes) bool {
	return s.denied[a.Verb+" "+a.Resource] == "agent"
}

func TestBrokenClusters(t *testing.T) {
	for code, break_ := range map[string]func(s *server){
		"": func(*server) {},
		"CH0604": func(s *server) {
			s.objects = append(s.objects, &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "other"}, Spec: class(`device.driver == "other"`)})
		},
		"CH0605": func(s *server) { s.denied["patch resourceclaims"] = "agent" },
		"CH0607": func(s *server) { s.drop("n") },
		"CH0612": func(s *server) { s.drop("slices.chandler.dev") },
	} {
		t.Run(code, func(t *testing.T) {
			s := newServer()
			break_(s)
			var want []string
			if code != "" {
				want = []string{code}
			}
			report := doctor.JudgeFacts(s.facts(), codes.Cluster)
			if found := report.Codes(); !slices.Equal(found, want) {
				t.Errorf("found %v, want %v: %+v", found, want, report.Sections)
			}
		})
	}
}

// No request for resource.k8s.io is sent to a server without that API group.
func TestClassicCluster(t *testing.T) {
	s := newServer()
	s.without = true
	s.drop("parameters.chandler.dev")
	f := s.facts()
	if found := doctor.JudgeFacts(f, codes.Cluster).Codes(); f.Cluster.DRA.Value != "" || len(found) > 0 {
		t.Errorf("found %v", found)
	}
}

// If a server has only an older version of resource.k8s.io, the requests use that version.
func TestOlderVersions(t *testing.T) {
	for _, version := range []string{"v1beta2", "v1beta1"} {
		s := newServer()
		s.older, s.all = version, true
		s.objects = append(s.objects,
			&resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "s"}, Spec: resourceapi.ResourceSliceSpec{Driver: "chandler.dev", NodeName: new("n"), Devices: []resourceapi.Device{{Name: "d"}}}},
			apitest.AllocatedClaim("c", "u", "d"))
		f := s.facts()
		if served := f.Cluster.DRA; served != doctor.KnownAnswer(version) {
			t.Errorf("%s: %+v is said to be served", version, served)
		}
		slices, classes, claims := f.Cluster.Slices.Value, f.Cluster.Classes.Value, f.Cluster.Claims.Value
		if len(slices) != 1 || slices[0].Spec.Devices[0].Name != "d" || len(classes) != 1 || classes[0].Spec.ExtendedResourceName == nil || len(claims) != 1 || claims[0].Status.Allocation == nil {
			t.Errorf("%s: slices %+v, classes %+v, claims %+v", version, slices, classes, claims)
		}
		if found := doctor.JudgeFacts(f, codes.Cluster).Codes(); len(found) > 0 {
			t.Errorf("%s: found %v", version, found)
		}
	}
}

// A kubelet's credentials permit only the slices of its own node. Doctor reports nothing about
// other slices.
func TestKubeletCredentials(t *testing.T) {
	s := newServer()
	s.all = true
	for _, what := range []string{"list resourceslices", "list deviceclasses", "get validatingadmissionpolicies"} {
		s.denied[what] = "self"
	}
	f := s.facts()
	if f.Cluster.Slices.Unknown != "" || !strings.Contains(f.Cluster.OwnOnly, "permit") {
		t.Errorf("slices: %q, of this node alone because %q", f.Cluster.Slices.Unknown, f.Cluster.OwnOnly)
	}
	report := doctor.JudgeFacts(f, codes.Cluster)
	if found := report.Codes(); len(found) > 0 || report.Count(codes.NotQueried) < 3 {
		t.Errorf("found %v, %+v", found, report.Sections)
	}
	if got := f.Cluster.Policies.Unknown; !strings.Contains(got, "--kubeconfig") || strings.Contains(got, "forbidden") {
		t.Errorf("the policies: %q", got)
	}
}

// The agent's pod and the pods of other plugins are found among the pods of the node.
func TestPods(t *testing.T) {
	f := newServer().facts()
	if pod := f.Agent.Pod.Value; pod == nil || pod.Name != "chandler-x" {
		t.Errorf("the agent's pod is %v", pod)
	}
	if want := []string{"kube-system/other-abcde"}; !slices.Equal(f.Kubelet.PluginPods, want) {
		t.Errorf("other plugins: %v", f.Kubelet.PluginPods)
	}
}

// A second agent that is not ready is found beside the ready agent, and its reason is
// requested.
func TestAgentBeside(t *testing.T) {
	next := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(doctor.UnreadyHeader, string(doctor.UnreadyConfig))
		http.Error(w, r.URL.Path+": the configuration is invalid", http.StatusServiceUnavailable)
	}))
	defer next.Close()
	host, port, _ := net.SplitHostPort(next.Listener.Addr().String())
	number, _ := strconv.Atoi(port)
	s := newServer()
	s.objects = append(s.objects, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "chandler", Name: "chandler-next", Labels: map[string]string{"app.kubernetes.io/name": "chandler"}},
		Spec:       corev1.PodSpec{NodeName: "n", Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: int32(number)}}}}},
		Status:     corev1.PodStatus{PodIP: host},
	})
	f := s.facts()
	if pod := f.Agent.Pod.Value; pod == nil || pod.Name != "chandler-x" {
		t.Errorf("the agent's pod is %v", pod)
	}
	askBeside(t.Context(), &f.Agent)
	if b := f.Agent.OtherAgents; len(b) != 1 || b[0].Pod.Name != "chandler-next" || b[0].Why != "/readyz: the configuration is invalid" || b[0].Unready != doctor.UnreadyConfig {
		t.Errorf("beside it: %+v", b)
	}
}

// An agent of another DaemonSet is never the successor of the agent, even if it is not ready.
func TestAgentOfAnotherInstallation(t *testing.T) {
	of := func(uid string) []metav1.OwnerReference {
		return []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "chandler", UID: types.UID(uid), Controller: new(true)}}
	}
	for name, test := range map[string]struct {
		namespace, owner string
		want             []string
	}{
		"an update":         {"chandler", "a", nil},
		"another DaemonSet": {"chandler", "b", []string{"CH0708"}},
		"another namespace": {"gpu", "b", []string{"CH0708"}},
	} {
		s := newServer()
		s.objects[1].(*corev1.Pod).OwnerReferences = of("a")
		s.objects = append(s.objects, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: test.namespace, Name: "chandler-other", OwnerReferences: of(test.owner), Labels: map[string]string{"app.kubernetes.io/name": "chandler"}, CreationTimestamp: metav1.Now()},
			Spec:       corev1.PodSpec{NodeName: "n"},
		})
		report := doctor.JudgeFacts(s.facts(), codes.Agent)
		if found := report.Codes(); !slices.Equal(found, test.want) {
			t.Errorf("%s: found %v, want %v", name, found, test.want)
		}
	}
}

// Doctor checks exactly the permissions that the manifests grant.
func TestPermissions(t *testing.T) {
	data, err := os.ReadFile("../../../deployments/rbac.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var role rbacv1.ClusterRole
	for document := range strings.SplitSeq(string(data), "\n---\n") {
		if strings.Contains(document, "kind: ClusterRole\n") {
			if err := yaml.Unmarshal([]byte(document), &role); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, r := range RequiredRights(true) {
		resource := strings.TrimPrefix(r.String(), r.Verb+" ")
		if !slices.ContainsFunc(role.Rules, func(rule rbacv1.PolicyRule) bool {
			return slices.Contains(rule.APIGroups, r.Group) && slices.Contains(rule.Resources, resource) && slices.Contains(rule.Verbs, r.Verb)
		}) {
			t.Errorf("%s is not in rbac.yaml", r)
		}
	}
}

// Doctor checks exactly the policies in the manifests.
func TestPolicies(t *testing.T) {
	files, err := filepath.Glob("../../../deployments/admission*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for document := range strings.SplitSeq(string(data), "\n---\n") {
			var policy metav1.PartialObjectMetadata
			if err := yaml.Unmarshal([]byte(document), &policy); err == nil && policy.Kind == "ValidatingAdmissionPolicy" {
				found = append(found, policy.Name)
			}
		}
	}
	slices.Sort(found)
	if !slices.Equal(found, Policies) {
		t.Errorf("the manifests have %v, and doctor looks for %v", found, Policies)
	}
}

// The local clock is compared with the server's clock.
func TestSkew(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Date", time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat))
	}))
	defer server.Close()
	got, err := clockSkew(t.Context(), &rest.Config{Host: server.URL})
	if err != nil || (got-time.Hour).Abs() > 2*time.Second {
		t.Errorf("%s, %v", got, err)
	}
}

// The agent's probes and the features in its metrics are read. An agent that hangs delays
// doctor by a few seconds only.
func TestAgentAnswers(t *testing.T) {
	wrong := "the configuration is invalid: exclude[0].cel"
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/readyz":
			w.Header().Set(doctor.UnreadyHeader, string(doctor.UnreadyConfig))
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprintln(w, wrong)
		case "/metrics":
			fmt.Fprint(w, "# HELP x\nchandler_dra_server_feature_enabled{feature=\"DRADeviceTaints\"} 0\nchandler_dra_server_feature_enabled{feature=\"DRAConsumableCapacity\"} 1\n")
		}
	}))
	defer server.Close()
	n := newMadeUp(t)
	n.options.Agent = strings.TrimPrefix(server.URL, "http://")
	f := n.facts()
	if f.Agent.Ready.Value != wrong || f.Agent.Live.Value != "" || f.Agent.Features.Value["DRADeviceTaints"] || !f.Agent.Features.Value["DRAConsumableCapacity"] {
		t.Errorf("%+v", f.Agent)
	}
	if found := doctor.JudgeFacts(f, codes.Agent).Codes(); !slices.Equal(found, []string{"CH0703"}) {
		t.Errorf("found %v", found)
	}
	server.Close()
	if found := doctor.JudgeFacts(n.facts(), codes.Agent).Codes(); !slices.Equal(found, []string{"CH0701"}) {
		t.Errorf("without an answer: found %v", found)
	}
}
