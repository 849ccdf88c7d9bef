package validation

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
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
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/compile"
	"chandler.dev/internal/jsonerror"
	"chandler.dev/internal/selectors"
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
	case v1alpha1.KindProvisionConfig:
		_, err = compile.Provision(data)
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
				v.addFindings(at, severityWarning, fmt.Errorf("%s[%d].cel: is that of %s[%d], and the first that selects a device counts: the later one never does", list, j, list, i))
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
	if _, err := v.decodeTyped(data); runtime.IsNotRegisteredError(err) {
		v.errorf(at, "is apiVersion %q, which is unknown; want a version such as %s", object.GetAPIVersion(), resourceapi.SchemeGroupVersion)
	} else if err != nil {
		v.addFindings(at, severityError, err)
	}
	v.checkParameters(at, object)
	v.compileSelectors(at.at("spec"), object.Object["spec"])
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
			v.addFindings(at, severityWarning, fmt.Errorf("%s: no device takes it, and a claim for any is refused", name))
		}
	}
	return parameters
}

// compileSelectors compiles the expressions that select devices. It searches the whole object,
// because each version of resource.k8s.io has them in another place.
func (v *validator) compileSelectors(at place, value any) {
	switch value := value.(type) {
	case []any:
		for i, item := range value {
			v.compileSelectors(at.at(fmt.Sprintf("[%d]", i)), item)
		}
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(value)) {
			switch expression, is := celExpression(key, value[key]); {
			case is:
				if _, err := rules.Compile(expression); err != nil {
					v.addFindings(at.at("cel.expression"), severityError, err)
				}
				v.noteNVML(at.at("cel.expression"), selectors.NameFromNVML(expression))
				v.warnAttributes(at.at("cel.expression"), expression)
			case key == "matchAttribute":
				if name, own := strings.CutPrefix(fmt.Sprint(value[key]), discovery.Domain+"/"); own {
					v.warnAttribute(at.at(key), name)
				}
			case key == "deviceClassName":
				v.warnReplacedClass(at.at(key), value[key])
			case key == "capacity":
				if memory, _, _ := unstructured.NestedFieldNoCopy(value, key, "requests", "memory"); memory != nil {
					v.noteNVML(at.at("capacity.requests.memory"), "memory")
				}
			case key != "opaque": // opaque parameters can contain anything
				v.compileSelectors(at.at(key), value[key])
			}
		}
	}
}

// ownAttribute matches the name of an attribute of Chandler's domain in a CEL expression.
var ownAttribute = regexp.MustCompile(`attributes\[["']` + regexp.QuoteMeta(discovery.Domain) + `["']\](?:\.\??|\[\??["'])([A-Za-z_]\w*)`)

// warnAttributes warns about attributes in an expression that some or all devices lack.
func (v *validator) warnAttributes(at place, expression string) {
	for _, found := range ownAttribute.FindAllStringSubmatch(expression, -1) {
		v.warnAttribute(at, found[1])
	}
}

// warnAttribute warns about an attribute that no device has, and notes that ResourceSlices do not have
// an attribute by default.
func (v *validator) warnAttribute(at place, name string) {
	if slices.Contains(discovery.OptionalAttributes, resourceapi.QualifiedName(name)) {
		v.notef(at, "%s", PublicationNote(name))
		return
	}
	names := discovery.AttributeNames()
	if slices.Contains(names, name) {
		return
	}
	text := "no device has the attribute " + name
	if nearest := selectors.NearestWord(name, names); nearest != "" {
		text += "; the nearest name is " + nearest
	}
	v.addFindings(at, severityWarning, errors.New(text))
}

// PublicationNote returns what the agent's configuration needs so that ResourceSlices have an attribute,
// or "" for attributes that they have by default.
func PublicationNote(name string) string {
	switch {
	case slices.Contains(discovery.OptionalAttributes, resourceapi.QualifiedName(name)):
		return fmt.Sprintf("ResourceSlices have the attribute %s only if the agent's configuration has attributes: [%s]", name, name)
	case slices.Contains(discovery.ReplacedByModel, resourceapi.QualifiedName(name)):
		return fmt.Sprintf("devices with a model have the attribute %s only if the agent's configuration has attributes: [%s]", name, name)
	}
	return ""
}

// ReplacedClasses are the classes of Chandler by the DeviceClasses that they replace, which other
// drivers install.
var ReplacedClasses = map[string]string{
	"gpu.nvidia.com": "nvidia.chandler.dev", "mig.nvidia.com": "nvidia-mig.chandler.dev", "vfio.gpu.nvidia.com": "nvidia.chandler.dev",
	"gpu.amd.com": "amdgpu.chandler.dev", "vfio.gpu.amd.com": "amdgpu.chandler.dev",
	"gpu.intel.com": "gpu.chandler.dev", "gpu-vfio.intel.com": "gpu.chandler.dev", "gaudi.intel.com": "gaudi.chandler.dev", "qat.intel.com": "qat.chandler.dev",
	"tpu.google.com": "tpu.chandler.dev", "neuron.aws.com": "neuron.chandler.dev",
}

// warnReplacedClass warns about a request for the class of a driver that Chandler replaces.
func (v *validator) warnReplacedClass(at place, class any) {
	name, _ := class.(string)
	if own := ReplacedClasses[name]; own != "" {
		v.addFindings(at, severityWarning, fmt.Errorf("%s is the class of a driver that Chandler replaces; the class of Chandler is %s", name, own))
	}
}

// noteNVML notes that NVIDIA GPUs have an attribute or a capacity only with NVML. The name is "" if
// there is nothing to note.
func (v *validator) noteNVML(at place, name string) {
	if name != "" {
		v.notef(at, "the %s of NVIDIA GPUs is not known without NVML; in the chart, nvml.enabled adds it", name)
	}
}

func celExpression(key string, value any) (string, bool) {
	cel, _ := value.(map[string]any)
	expression, is := cel["expression"].(string)
	return expression, is && key == "cel"
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
