package gather

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"chandler.dev/internal/doctor"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/podclaims"
)

// fromCache allows the API server to answer from its cache, which is recent enough and cheap.
var fromCache = metav1.ListOptions{ResourceVersion: "0"}

// gatherCluster gathers facts from the API server.
func gatherCluster(ctx context.Context, o Options, config *rest.Config, f *doctor.Facts) {
	c := &f.Cluster
	config = rest.CopyConfig(config)
	config.Timeout, config.QPS, config.Burst = Patience, 50, 100
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		c.Server = doctor.UnknownAnswer[string](err.Error())
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 3*Patience)
	defer cancel()
	queryServer(ctx, o, client, f)
	if c.Server.Unknown == "" && o.needs(codes.Host) {
		f.Host.Skew = doctor.AnswerOf(clockSkew(ctx, config))
	}
}

// queryServer gathers all facts from the API server except the clock skew.
func queryServer(ctx context.Context, o Options, client kubernetes.Interface, f *doctor.Facts) {
	c := &f.Cluster
	info, err := client.Discovery().ServerVersion()
	if err != nil {
		c.Server = doctor.UnknownAnswer[string](err.Error())
		return
	}
	c.Server = doctor.KnownAnswer(info.GitVersion)
	if o.needs(codes.Cluster, codes.APIs) {
		c.DRA = doctor.AnswerOf(servedDRA(client))
	}
	if c.DRA.Value != "" {
		listDRA(ctx, o, client, c)
	}
	node, err := client.CoreV1().Nodes().Get(ctx, o.Node, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		node, err = nil, nil
	}
	c.Node = doctor.AnswerOf(node, err)
	if node != nil && err == nil {
		f.Kubernetes = node.Status.NodeInfo.KubeletVersion
	} else {
		f.Kubernetes = info.GitVersion
	}
	if o.needs(codes.Kubelet, codes.Agent, codes.Cluster) {
		listPods(ctx, o, client, f)
	}
	if c.DRA.Value != "" && o.needs(codes.Cluster) && !o.AllNodes {
		c.Claims = claimsOfPods(ctx, client, c.Pods)
	}
	if o.needs(codes.Cluster) {
		c.Policies = doctor.AnswerOf(missingPolicies(ctx, client, c.DRA.Value != ""))
		c.Rights = doctor.AnswerOf(missingRights(ctx, client, f.Agent.Pod.Value, c.DRA.Value != ""))
	}
}

// listPods lists the pods of the node.
func listPods(ctx context.Context, o Options, client kubernetes.Interface, f *doctor.Facts) {
	c := &f.Cluster
	pods, err := client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", o.Node).String()})
	if err != nil {
		c.Pods = doctor.UnknownAnswer[[]corev1.Pod](err.Error())
		f.Agent.Pod = doctor.UnknownAnswer[*corev1.Pod](err.Error())
	} else {
		c.Pods = doctor.KnownAnswer(pods.Items)
		found := agentPod(pods.Items)
		f.Agent.Pod, f.Agent.OtherAgents = doctor.KnownAnswer(found), otherAgents(pods.Items, found)
		f.Kubelet.PluginPods = pluginPods(pods.Items, o.PluginDir)
	}
}

// servedDRA returns the newest version of resource.k8s.io supported by both the API server and
// the driver, or "" if there is none.
func servedDRA(client kubernetes.Interface) (string, error) {
	for _, version := range []string{"v1", "v1beta2", "v1beta1"} {
		_, err := client.Discovery().ServerResourcesForGroupVersion(resourceapi.GroupName + "/" + version)
		switch {
		case err == nil:
			return version, nil
		case !apierrors.IsNotFound(err):
			return "", err
		}
	}
	return "", nil
}

// listDRA lists the objects of resource.k8s.io in the version that the API server serves: the slices
// of this node and the classes. The slices and the claims of the whole cluster may have hundreds of
// megabytes, and are listed only with [Options.AllNodes]. A kubelet's credentials permit only the
// slices of its own node.
func listDRA(ctx context.Context, o Options, of kubernetes.Interface, c *doctor.ClusterFacts) {
	client := draclient.New(of)
	own := fromCache
	own.FieldSelector = fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorNodeName, o.Node).String()
	options, all := own, o.AllNodes && o.needs(codes.Cluster)
	if c.OwnOnly = withAllNodes; all {
		options, c.OwnOnly = fromCache, ""
	}
	slices, err := client.ResourceSlices().List(ctx, options)
	if all && apierrors.IsForbidden(err) {
		c.OwnOnly = "these credentials do not permit reading the slices of other nodes"
		slices, err = client.ResourceSlices().List(ctx, own)
	}
	if err != nil {
		c.Slices = doctor.UnknownAnswer[[]resourceapi.ResourceSlice](err.Error())
	} else {
		c.Slices = doctor.KnownAnswer(slices.Items)
	}
	if !o.needs(codes.Cluster) {
		return
	}
	classes, err := client.DeviceClasses().List(ctx, fromCache)
	if err != nil {
		c.Classes = doctor.UnknownAnswer[[]resourceapi.DeviceClass](err.Error())
	} else {
		c.Classes = doctor.KnownAnswer(classes.Items)
	}
	if !all {
		return
	}
	claims, err := client.ResourceClaims("").List(ctx, fromCache)
	if err != nil {
		c.Claims = doctor.UnknownAnswer[[]resourceapi.ResourceClaim](err.Error())
	} else {
		c.Claims = doctor.KnownAnswer(claims.Items)
	}
}

// withAllNodes is the reason why the claims that wait for a device were not gathered.
const withAllNodes = "requires --all-nodes, which reads the claims and ResourceSlices of the whole cluster"

// claimsOfPods reads the claims of the node's pods, one by one.
func claimsOfPods(ctx context.Context, of kubernetes.Interface, pods doctor.Answer[[]corev1.Pod]) doctor.Answer[[]resourceapi.ResourceClaim] {
	if pods.Unknown != "" {
		return doctor.UnknownAnswer[[]resourceapi.ResourceClaim](pods.Unknown)
	}
	client := draclient.New(of)
	var claims []resourceapi.ResourceClaim
	read := make(map[string]bool)
	for i := range pods.Value {
		for _, name := range podclaims.ClaimsOf(&pods.Value[i]) {
			key := pods.Value[i].Namespace + "/" + name
			if read[key] {
				continue
			}
			read[key] = true
			claim, err := client.ResourceClaims(pods.Value[i].Namespace).Get(ctx, name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				continue
			}
			if err != nil {
				return doctor.UnknownAnswer[[]resourceapi.ResourceClaim](err.Error())
			}
			claims = append(claims, *claim)
		}
	}
	return doctor.KnownAnswer(claims)
}

// clockSkew returns how far the local clock is ahead of the API server's clock. The server's Date
// header has a resolution of one second.
func clockSkew(ctx context.Context, config *rest.Config) (time.Duration, error) {
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return 0, err
	}
	host, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return 0, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, host.JoinPath("/version").String(), nil)
	if err != nil {
		return 0, err
	}
	before := time.Now()
	answer, err := client.Do(request)
	if err != nil {
		return 0, err
	}
	answer.Body.Close()
	middle := before.Add(time.Since(before) / 2)
	server, err := http.ParseTime(answer.Header.Get("Date"))
	if err != nil {
		return 0, fmt.Errorf("the API server's time: %w", err)
	}
	return middle.Sub(server), nil
}

// agentPod returns the agent's pod on the node, or nil if there is none. If there are several
// pods, a ready pod is preferred.
func agentPod(pods []corev1.Pod) (found *corev1.Pod) {
	for i := range pods {
		p := &pods[i]
		if p.Labels["app.kubernetes.io/name"] != "chandler" || p.DeletionTimestamp != nil {
			continue
		}
		if found == nil || !isReady(found) && isReady(p) {
			found = p
		}
	}
	return found
}

// otherAgents returns all agents on the node except the pod but.
func otherAgents(pods []corev1.Pod, but *corev1.Pod) (others []doctor.OtherAgent) {
	for i := range pods {
		p := &pods[i]
		if p.Labels["app.kubernetes.io/name"] == "chandler" && p.DeletionTimestamp == nil && p != but {
			others = append(others, doctor.OtherAgent{Pod: p, Foreign: installationID(p) != installationID(but)})
		}
	}
	return others
}

// installationID returns an identifier shared by the pods of one DaemonSet.
func installationID(pod *corev1.Pod) string {
	if of := metav1.GetControllerOf(pod); of != nil {
		return pod.Namespace + "/" + string(of.UID)
	}
	return pod.Namespace
}

func isReady(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// pluginPods returns the pods of other programs that mount the device-plugins directory.
func pluginPods(pods []corev1.Pod, dir string) (found []string) {
	for i := range pods {
		p := &pods[i]
		if p.Labels["app.kubernetes.io/name"] == "chandler" {
			continue
		}
		for _, v := range p.Spec.Volumes {
			if v.HostPath != nil && (strings.TrimRight(v.HostPath.Path, "/") == strings.TrimRight(dir, "/") || strings.HasSuffix(strings.TrimRight(v.HostPath.Path, "/"), "/device-plugins")) {
				found = append(found, p.Namespace+"/"+p.Name)
				break
			}
		}
	}
	slices.Sort(found)
	return found
}

// Policies are the names of the ValidatingAdmissionPolicies in deployments/. Without these
// policies, mistakes and attacks are detected late.
var Policies = []string{"claims.chandler.dev", "events.chandler.dev", "parameters.chandler.dev", "pods.chandler.dev", "slices.chandler.dev"}

// errPoliciesForbidden is the result for the agent's own service account, which has no permission to read policies.
var errPoliciesForbidden = errors.New("these credentials may not read them; run doctor with the credentials of an administrator (--kubeconfig)")

func missingPolicies(ctx context.Context, client kubernetes.Interface, dra bool) (missing []string, err error) {
	for _, name := range Policies {
		if !dra && name != "events.chandler.dev" && name != "pods.chandler.dev" {
			continue // the objects that the policy checks do not exist
		}
		_, err := client.AdmissionregistrationV1().ValidatingAdmissionPolicies().Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			missing = append(missing, name)
		case apierrors.IsForbidden(err):
			return nil, errPoliciesForbidden
		case err != nil:
			return nil, err
		}
	}
	return missing, nil
}

// Right is an API permission that the agent needs.
type Right struct{ Verb, Group, Resource, Subresource string }

// RequiredRights returns the API permissions that the agent needs.
func RequiredRights(dra bool) []Right {
	rights := []Right{
		{"get", "", "nodes", ""}, {"watch", "", "nodes", ""}, {"list", "", "pods", ""}, {"create", "events.k8s.io", "events", ""},
	}
	if !dra {
		return rights
	}
	for _, verb := range []string{"get", "list", "watch", "create", "update", "delete"} {
		rights = append(rights, Right{verb, resourceapi.GroupName, "resourceslices", ""})
	}
	return append(rights,
		Right{"get", resourceapi.GroupName, "resourceclaims", ""}, Right{"list", resourceapi.GroupName, "resourceclaims", ""},
		Right{"patch", resourceapi.GroupName, "resourceclaims", "status"}, Right{"list", resourceapi.GroupName, "deviceclasses", ""})
}

// missingRights returns the permissions that the agent lacks, according to the API server's
// access reviews. If the process runs under the agent's service account, missingRights reviews
// the process itself, otherwise that account. The API server does not store these reviews.
func missingRights(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod, dra bool) (missing []string, err error) {
	user := "system:serviceaccount:chandler:chandler"
	if pod != nil {
		user = "system:serviceaccount:" + pod.Namespace + ":" + pod.Spec.ServiceAccountName
	}
	itself, err := client.AuthenticationV1().SelfSubjectReviews().Create(ctx, selfReview(), metav1.CreateOptions{})
	own := err == nil && itself.Status.UserInfo.Username == user
	for _, r := range RequiredRights(dra) {
		attributes := &authorizationv1.ResourceAttributes{Verb: r.Verb, Group: r.Group, Resource: r.Resource, Subresource: r.Subresource}
		allowed := false
		if own {
			review, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: attributes}}, metav1.CreateOptions{})
			if err != nil {
				return nil, err
			}
			allowed = review.Status.Allowed
		} else {
			groups := []string{"system:serviceaccounts", "system:authenticated"}
			review, err := client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: user, Groups: groups, ResourceAttributes: attributes}}, metav1.CreateOptions{})
			if err != nil {
				return nil, err
			}
			allowed = review.Status.Allowed
		}
		if !allowed {
			missing = append(missing, r.String())
		}
	}
	return missing, nil
}

// String returns the permission as a verb and a resource.
func (r Right) String() string {
	what := r.Resource
	if r.Subresource != "" {
		what += "/" + r.Subresource
	}
	return r.Verb + " " + what
}
