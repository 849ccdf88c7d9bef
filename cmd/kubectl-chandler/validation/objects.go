package validation

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	kubejson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/internal/compile"
	"chandler.dev/internal/jsonerror"
)

// resourceGroup is the API group of Dynamic Resource Allocation.
const resourceGroup = "resource.k8s.io"

// ownKinds are the kinds of chandler.dev.
var ownKinds = []string{v1alpha1.KindClaimParameters, v1alpha1.KindDriverConfig, v1alpha1.KindProvisionConfig}

// configOf maps kinds of resource.k8s.io, in all versions, to the path of their driver parameters.
var configOf = map[string][]string{
	"ResourceClaim":         {"spec", "devices", "config"},
	"ResourceClaimTemplate": {"spec", "spec", "devices", "config"},
	"DeviceClass":           {"spec", "config"},
}

// checkDocument checks one document of a file.
func (v *validator) checkDocument(at place, text string) {
	data, err := yaml.YAMLToJSONStrict([]byte(text))
	if err != nil {
		v.addFindings(at, severityError, err)
		return
	}
	v.checkJSON(at, data)
}

func (v *validator) checkJSON(at place, data []byte) {
	var content any
	if err := kubejson.UnmarshalCaseSensitivePreserveInts(data, &content); err != nil {
		v.addFindings(at, severityError, err)
		return
	}
	switch content := content.(type) {
	case nil:
	case map[string]any:
		v.checkObject(at, &unstructured.Unstructured{Object: content}, data)
	default:
		v.errorf(at, "is not an object")
	}
}

// checkObject checks an object, whose JSON is data.
func (v *validator) checkObject(at place, object *unstructured.Unstructured, data []byte) {
	at.object = strings.TrimSpace(object.GetKind() + " " + object.GetName())
	group := object.GroupVersionKind().Group
	switch _, known := configOf[object.GetKind()]; {
	case v.found && object.GetAPIVersion() == "" && object.GetKind() == "":
		v.notef(at, "is not checked: has neither apiVersion nor kind") // a patch, or the values of a chart
	case object.GetAPIVersion() == "" || object.GetKind() == "":
		v.errorf(at, "has no apiVersion or no kind")
	case object.IsList():
		v.checkList(at, object)
	case group == discovery.Domain:
		v.checkOwn(at, object.GetKind(), data)
	case group == resourceGroup && known:
		v.checkResource(at, object, data)
	case group == "" && object.GetKind() == "ConfigMap":
		v.configMap(at, object)
	default:
		v.checkPods(at, object, data)
	}
}

// checkList checks the objects of a list, such as kubectl prints.
func (v *validator) checkList(at place, list *unstructured.Unstructured) {
	items, _ := list.Object["items"].([]any) // nil if the field is not a list
	for i, item := range items {
		data, err := json.Marshal(item)
		if err != nil {
			v.addFindings(at, severityError, err)
			continue
		}
		item := at.at(fmt.Sprintf("items[%d]", i))
		item.object = ""
		v.checkJSON(item, data)
	}
}

// checkOwn checks an object of chandler.dev.
func (v *validator) checkOwn(at place, kind string, data []byte) {
	v.checked++
	var err error
	switch kind {
	case v1alpha1.KindClaimParameters:
		v.claimParameters(at, data)
	case v1alpha1.KindDriverConfig:
		var config *v1alpha1.DriverConfig
		if config, err = compile.Config(data); err == nil {
			v.warnUnreached(at, config)
		}
		v.checkConfigNames(at, data)
	case v1alpha1.KindProvisionConfig:
		_, err = compile.Provision(data)
		v.checkConfigNames(at, data)
	default:
		err = fmt.Errorf("is kind %q; want %s", kind, strings.Join(ownKinds, ", "))
	}
	if err != nil {
		v.addFindings(at, severityError, err)
	}
}

// warnUnreached warns about entries that never match because an earlier entry has the same
// selector.
func (v *validator) warnUnreached(at place, config *v1alpha1.DriverConfig) {
	selectors := make(map[string][]v1alpha1.Selector)
	for _, e := range config.Sharing {
		selectors["sharing"] = append(selectors["sharing"], e.Selector)
	}
	for _, e := range config.Resources {
		selectors["resources"] = append(selectors["resources"], e.Selector)
	}
	for _, list := range slices.Sorted(maps.Keys(selectors)) {
		for j, later := range selectors[list] {
			i := slices.IndexFunc(selectors[list][:j], func(s v1alpha1.Selector) bool {
				return s.CEL == later.CEL && (s.Nodes == nil || reflect.DeepEqual(s.Nodes, later.Nodes))
			})
			if i >= 0 {
				v.addFindings(at.at(fmt.Sprintf("%s[%d].cel", list, j)), severityWarning, fmt.Errorf("is that of %s[%d], and the first that selects a device counts: the later one never does", list, i))
			}
		}
	}
}

// configMap checks the configurations of Chandler in a ConfigMap.
func (v *validator) configMap(at place, object *unstructured.Unstructured) {
	values, _, err := unstructured.NestedStringMap(object.Object, "data")
	if err != nil {
		v.addFindings(at, severityError, err)
		return
	}
	found := false
	for _, key := range slices.Sorted(maps.Keys(values)) {
		field := at.at("data[" + key + "]")
		meta, err := typeOf(values[key])
		switch ours := strings.Contains(values[key], discovery.Domain+"/v1"); {
		case err != nil && ours:
			v.addFindings(field.insideString(), severityError, err)
			found = true
		case err == nil && strings.HasPrefix(meta.APIVersion, discovery.Domain+"/"):
			v.checkOwn(field.insideString(), meta.Kind, []byte(values[key]))
			found = true
		}
	}
	if !found {
		v.others[object.GetKind()]++
	}
}

func typeOf(text string) (meta runtime.TypeMeta, err error) {
	err = yaml.Unmarshal([]byte(text), &meta)
	return meta, err
}

// checkResource checks a claim, a claim template or a device class.
func (v *validator) checkResource(at place, object *unstructured.Unstructured, data []byte) {
	v.checked++
	typed, err := v.decodeTyped(data)
	switch {
	case runtime.IsNotRegisteredError(err):
		v.errorf(at, "is apiVersion %q, which is unknown; want a version such as %s", object.GetAPIVersion(), resourceapi.SchemeGroupVersion)
	case err != nil:
		v.addFindings(at, severityError, err)
	default:
		v.checkServer(at, typed)
	}
	v.checkParameters(at, object)
	v.compileSelectors(at.at("spec"), object.Object["spec"], true)
	if name, _, _ := unstructured.NestedString(object.Object, "spec", "extendedResourceName"); name != "" {
		v.classes[name] = append(v.classes[name], namedClass{object.GetName(), at.at("spec.extendedResourceName")})
	}
}

// decodeTyped decodes a Kubernetes object, as strictly as the API server with
// fieldValidation=Strict.
func (v *validator) decodeTyped(data []byte) (runtime.Object, error) {
	typed, _, err := v.decoder.Decode(data, nil, nil)
	if strict, ok := runtime.AsStrictDecodingError(err); ok {
		return typed, errors.Join(strict.Errors()...)
	}
	return typed, jsonerror.Describe(data, err)
}

// claimParameters checks parameters. It warns about parameters that no family supports and that do
// not apply to every device. Whether the devices of a claim support them is known only after
// allocation.
func (v *validator) claimParameters(at place, data []byte) discovery.Parameters {
	parameters, err := compile.Parameters(data)
	if err != nil {
		v.addFindings(at, severityError, err)
	}
	for _, name := range slices.Sorted(maps.Keys(parameters)) {
		if name != discovery.Driver && !slices.ContainsFunc(families.All, func(f *discovery.Family) bool { return f.AcceptsParameter(name) }) {
			v.addFindings(at.descendTo(string(name)), severityWarning, fmt.Errorf("%s: no device takes it, and a claim for any is refused", name))
		}
	}
	return parameters
}

// A namedClass is a device class with an extended resource name.
type namedClass struct {
	name string
	at   place
}

// sharedNames warns about several classes with the same extended resource name.
func (v *validator) sharedNames() {
	for _, resource := range slices.Sorted(maps.Keys(v.classes)) {
		first := v.classes[resource][0]
		for _, class := range v.classes[resource][1:] {
			if class.name != first.name { // otherwise, the same class was read twice
				v.addFindings(class.at, severityWarning, fmt.Errorf("is %s, as in DeviceClass %s (%s); pods that request it get devices of the class that was created last",
					resource, first.name, first.at))
			}
		}
	}
}

// checkPods checks objects that contain pods, and ignores all others.
func (v *validator) checkPods(at place, object *unstructured.Unstructured, data []byte) {
	typed, err := v.decodeTyped(data)
	pod, path := podSpec(typed)
	switch {
	case pod != nil:
		v.checked++
		if err != nil {
			v.addFindings(at, severityError, err)
		}
		v.checkPod(at.at(path), pod)
	case err != nil && !runtime.IsNotRegisteredError(err) && podKinds[object.GetKind()]:
		v.checked++
		v.addFindings(at, severityError, err)
	default:
		v.others[object.GetKind()]++
	}
}

// podKinds are the kinds that contain pods.
var podKinds = map[string]bool{
	"Pod": true, "PodTemplate": true, "Deployment": true, "DaemonSet": true, "StatefulSet": true,
	"ReplicaSet": true, "ReplicationController": true, "Job": true, "CronJob": true,
}

// podSpec returns the pod spec of an object and its path, or nil.
func podSpec(object runtime.Object) (*corev1.PodSpec, string) {
	const template = "spec.template.spec"
	switch o := object.(type) {
	case *corev1.Pod:
		return &o.Spec, "spec"
	case *corev1.PodTemplate:
		return &o.Template.Spec, "template.spec"
	case *corev1.ReplicationController:
		if o.Spec.Template != nil {
			return &o.Spec.Template.Spec, template
		}
	case *appsv1.Deployment:
		return &o.Spec.Template.Spec, template
	case *appsv1.DaemonSet:
		return &o.Spec.Template.Spec, template
	case *appsv1.StatefulSet:
		return &o.Spec.Template.Spec, template
	case *appsv1.ReplicaSet:
		return &o.Spec.Template.Spec, template
	case *batchv1.Job:
		return &o.Spec.Template.Spec, template
	case *batchv1.CronJob:
		return &o.Spec.JobTemplate.Spec.Template.Spec, "spec.jobTemplate.spec.template.spec"
	}
	return nil, ""
}

// checkPod checks that containers name claims of their pod.
func (v *validator) checkPod(at place, pod *corev1.PodSpec) {
	check := func(list string, containers []corev1.Container) {
		for i, container := range containers {
			for j, claim := range container.Resources.Claims {
				if !slices.ContainsFunc(pod.ResourceClaims, func(c corev1.PodResourceClaim) bool { return c.Name == claim.Name }) {
					field := at.at(fmt.Sprintf("%s[%d].resources.claims[%d].name", list, i, j))
					v.errorf(field, "is %q, which is none of the pod's resourceClaims", claim.Name)
				}
			}
		}
	}
	check("initContainers", pod.InitContainers)
	check("containers", pod.Containers)
}
