package kubectl

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/cmd/kubectl-chandler/kubectl/cluster"
	"chandler.dev/internal/fleet"
)

// collect collects the data of the cluster and of some of its nodes.
func (r *reportOptions) collect(ctx context.Context, c *collection, nodes []string) error {
	read, err := r.ReadView(ctx, r.now(), cluster.Reading{Classes: true})
	if err != nil {
		return err
	}
	v := &view{read}
	c.missing = append(c.missing, v.Missing...)
	for i := range v.Slices {
		for j := range v.Slices[i].Spec.Devices {
			d := &v.Slices[i].Spec.Devices[j]
			c.redact.AddIdentity(fleet.Text(d, "serial"))
			c.redact.AddIdentity(fleet.Text(d, "uuid"))
		}
	}
	agents, err := cluster.ListAgents(ctx, v.Client)
	if err != nil {
		c.addMissing("agents' pods", err.Error())
	}
	for _, node := range r.chosenNodes(c, v, agents, nodes) {
		r.collectNode(ctx, c, v, node, agents[node])
	}
	v.collectCluster(ctx, c, agents)
	if r.anonymous {
		v.name(c, agents)
	}
	return nil
}

// chosenNodes returns the nodes of a report: the named nodes or, without names, all nodes with an
// agent, up to mostNodes.
func (r *reportOptions) chosenNodes(c *collection, v *view, agents map[string]*corev1.Pod, named []string) []string {
	if len(named) > 0 {
		for _, name := range named {
			known := slices.ContainsFunc(v.Nodes, func(n corev1.Node) bool { return n.Name == name })
			if !known && len(v.Nodes) > 0 {
				c.addMissing("node "+name, "it is not there")
			}
		}
		return named
	}
	all := slices.Sorted(maps.Keys(agents))
	if len(all) > mostNodes {
		c.addLine("nodes", fmt.Sprintf("%d have agents: name those that the report is to have", len(all)))
		return nil
	}
	return all
}

// collectCluster collects API objects, without their private parts.
func (v *view) collectCluster(ctx context.Context, c *collection, agents map[string]*corev1.Pod) {
	var claims []resourceapi.ResourceClaim
	for i := range v.Claims {
		if concernsReport(&v.Claims[i]) {
			claims = append(claims, *bareClaim(&v.Claims[i]))
		}
	}
	for i := range v.Slices {
		bareMeta(&v.Slices[i].ObjectMeta)
	}
	for i := range v.Classes {
		bareMeta(&v.Classes[i].ObjectMeta)
		v.Classes[i].Spec.Config = slices.DeleteFunc(v.Classes[i].Spec.Config, func(config resourceapi.DeviceClassConfiguration) bool {
			return config.Opaque != nil && config.Opaque.Driver != driverName
		})
	}
	c.addJSON("cluster/resourceslices.json", v.Slices)
	c.addJSON("cluster/resourceclaims.json", claims)
	c.addJSON("cluster/deviceclasses.json", v.Classes)
	c.addJSON("cluster/nodes.json", nodeFacts(v.Nodes))
	events := v.relatedEvents(ctx, c, claims, agents)
	c.addJSON("cluster/events.json", events)
	c.addJSON("cluster/pods.json", v.podFacts())
	if server, err := v.Client.Discovery().ServerVersion(); err == nil {
		c.addJSON("cluster/version.json", server)
	} else {
		c.addMissing("version of the API server", err.Error())
	}
	c.addLine("cluster", fmt.Sprintf("%d ResourceSlices, %d ResourceClaims, %d DeviceClasses, %d Events", len(v.Slices), len(claims), len(v.Classes), len(events)))
	v.collectConfig(ctx, c, agents)
}

// concernsReport reports whether a claim belongs into the report: if it has a device of Chandler,
// or is not allocated yet.
func concernsReport(claim *resourceapi.ResourceClaim) bool {
	return claim.Status.Allocation == nil || slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool { return r.Driver == driverName })
}

// bareClaim returns a copy of a claim without the parts of other drivers.
func bareClaim(claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	claim = claim.DeepCopy()
	bareMeta(&claim.ObjectMeta)
	claim.Spec.Devices.Config = slices.DeleteFunc(claim.Spec.Devices.Config, func(config resourceapi.DeviceClaimConfiguration) bool {
		return config.Opaque != nil && config.Opaque.Driver != driverName
	})
	if allocation := claim.Status.Allocation; allocation != nil {
		allocation.Devices.Config = slices.DeleteFunc(allocation.Devices.Config, func(config resourceapi.DeviceAllocationConfiguration) bool {
			return config.Opaque != nil && config.Opaque.Driver != driverName
		})
		allocation.Devices.Results = slices.DeleteFunc(allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool { return r.Driver != driverName })
	}
	claim.Status.Devices = slices.DeleteFunc(claim.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool { return d.Driver != driverName })
	return claim
}

// bareMeta removes managed fields, and annotations, which can contain anything.
func bareMeta(meta *metav1.ObjectMeta) {
	meta.ManagedFields, meta.Annotations = nil, nil
}

// nodeFact is the report's extract of a node.
type nodeFact struct {
	Name        string                 `json:"name"`
	Labels      map[string]string      `json:"labels,omitempty"`
	Taints      []corev1.Taint         `json:"taints,omitempty"`
	Info        corev1.NodeSystemInfo  `json:"info"`
	Capacity    corev1.ResourceList    `json:"capacity"`
	Allocatable corev1.ResourceList    `json:"allocatable"`
	Conditions  []corev1.NodeCondition `json:"conditions"`
}

func nodeFacts(nodes []corev1.Node) (out []nodeFact) {
	for i := range nodes {
		n := &nodes[i]
		info := n.Status.NodeInfo
		info.MachineID, info.SystemUUID, info.BootID = "", "", ""
		out = append(out, nodeFact{n.Name, n.Labels, n.Spec.Taints, info, n.Status.Capacity, n.Status.Allocatable, n.Status.Conditions})
	}
	return out
}

// podFact is the report's extract of a pod that requests devices. It contains neither the image nor
// the environment nor the arguments.
type podFact struct {
	Namespace  string                    `json:"namespace"`
	Name       string                    `json:"name"`
	Node       string                    `json:"node,omitempty"`
	Phase      corev1.PodPhase           `json:"phase"`
	Claims     []corev1.PodResourceClaim `json:"claims,omitempty"`
	Limits     []corev1.ResourceList     `json:"limits,omitempty"`
	Conditions []corev1.PodCondition     `json:"conditions,omitempty"`
	Health     [][]corev1.ResourceStatus `json:"allocatedResources,omitempty"`
}

func (v *view) podFacts() (out []podFact) {
	for i := range v.Pods {
		pod := &v.Pods[i]
		if !requestsDevices(pod) {
			continue
		}
		fact := podFact{Namespace: pod.Namespace, Name: pod.Name, Node: pod.Spec.NodeName, Phase: pod.Status.Phase, Claims: pod.Spec.ResourceClaims, Conditions: pod.Status.Conditions}
		for j := range pod.Spec.Containers {
			fact.Limits = append(fact.Limits, pod.Spec.Containers[j].Resources.Limits)
		}
		for _, status := range pod.Status.ContainerStatuses {
			fact.Health = append(fact.Health, status.AllocatedResourcesStatus)
		}
		out = append(out, fact)
	}
	return out
}

// requestsDevices reports whether a pod requests devices.
func requestsDevices(pod *corev1.Pod) bool {
	return len(pod.Spec.ResourceClaims) > 0 || slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool {
		for name := range c.Resources.Limits {
			if fleet.IsExtended(name) {
				return true
			}
		}
		return false
	})
}

// relatedEvents returns the Events about Chandler's own pods, about the claims, and about pods that
// request devices.
func (v *view) relatedEvents(ctx context.Context, c *collection, claims []resourceapi.ResourceClaim, agents map[string]*corev1.Pod) (out []corev1.Event) {
	all, err := cluster.ListObjects[corev1.Event](ctx, v.Client.CoreV1().Events(metav1.NamespaceAll).List, metav1.ListOptions{})
	if err != nil {
		c.addMissing("Events", err.Error())
		return nil
	}
	about := make(map[string]bool)
	for i := range claims {
		about["ResourceClaim/"+claims[i].Namespace+"/"+claims[i].Name] = true
	}
	for i := range v.Pods {
		if requestsDevices(&v.Pods[i]) {
			about["Pod/"+v.Pods[i].Namespace+"/"+v.Pods[i].Name] = true
		}
	}
	for _, pod := range agents {
		about["Pod/"+pod.Namespace+"/"+pod.Name] = true
		about["DaemonSet/"+pod.Namespace+"/"+metav1.GetControllerOf(pod).Name] = true
	}
	for i := range all {
		e := &all[i]
		object := &e.InvolvedObject
		own := strings.Contains(e.Source.Component, "chandler") || strings.Contains(e.ReportingController, "chandler")
		if own || about[object.Kind+"/"+object.Namespace+"/"+object.Name] {
			bareMeta(&e.ObjectMeta)
			out = append(out, *e)
		}
	}
	return out
}

// collectConfig collects Chandler's DaemonSets and configuration.
func (v *view) collectConfig(ctx context.Context, c *collection, agents map[string]*corev1.Pod) {
	var has []string
	seen := make(map[string]bool)
	for _, node := range slices.Sorted(maps.Keys(agents)) {
		pod := agents[node]
		name := metav1.GetControllerOf(pod).Name
		if key := pod.Namespace + "/" + name; !seen[key] {
			seen[key] = true
			set, err := v.Client.AppsV1().DaemonSets(pod.Namespace).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				c.addMissing("DaemonSet "+name, err.Error())
			} else {
				c.addJSON("config/daemonset-"+name+".json", bareSet(set))
				has = append(has, "DaemonSet "+name)
			}
		}
		for _, volume := range pod.Spec.Volumes {
			if volume.ConfigMap == nil || seen[volume.ConfigMap.Name] || strings.HasPrefix(volume.ConfigMap.Name, "kube-root-ca") {
				continue
			}
			seen[volume.ConfigMap.Name] = true
			config, err := v.Client.CoreV1().ConfigMaps(pod.Namespace).Get(ctx, volume.ConfigMap.Name, metav1.GetOptions{})
			if err != nil {
				c.addMissing("ConfigMap "+volume.ConfigMap.Name, err.Error())
				continue
			}
			for _, key := range slices.Sorted(maps.Keys(config.Data)) {
				c.add("config/"+config.Name+"-"+key, kindText, []byte(config.Data[key]))
			}
			has = append(has, "ConfigMap "+config.Name)
		}
	}
	c.addLine("config", strings.Join(append(has, "versions of all nodes"), ", "))
}

// bareSet returns a copy of a DaemonSet without the values of environment variables.
func bareSet(set *appsv1.DaemonSet) *appsv1.DaemonSet {
	set = set.DeepCopy()
	bareMeta(&set.ObjectMeta)
	set.Spec.Template.Annotations = nil
	for _, containers := range [][]corev1.Container{set.Spec.Template.Spec.InitContainers, set.Spec.Template.Spec.Containers} {
		for i := range containers {
			for j := range containers[i].Env {
				if containers[i].Env[j].Value != "" {
					containers[i].Env[j].Value = "..."
				}
			}
		}
	}
	return set
}

// name registers the names that the redactor replaces.
func (v *view) name(c *collection, agents map[string]*corev1.Pod) {
	own := make(map[string]bool)
	for _, pod := range agents {
		own[pod.Namespace] = true
	}
	namespaced := func(kind, namespace, name string) {
		if own[namespace] || namespace == "default" && kind == "namespace" || strings.HasPrefix(namespace, "kube-") {
			return
		}
		c.redact.Name(kind, name)
	}
	for i := range v.Pods {
		pod := &v.Pods[i]
		namespaced("namespace", pod.Namespace, pod.Namespace)
		namespaced("pod", pod.Namespace, pod.Name)
	}
	for i := range v.Claims {
		claim := &v.Claims[i]
		namespaced("namespace", claim.Namespace, claim.Namespace)
		namespaced("claim", claim.Namespace, claim.Name)
	}
}
