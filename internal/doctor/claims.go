package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apiserver/pkg/cel/environment"
	dracel "k8s.io/dynamic-resource-allocation/cel"

	"chandler.dev/discovery"
	"chandler.dev/internal/doctor/report"
	"chandler.dev/internal/selectors"
)

// published is a device of a ResourceSlice.
type published struct {
	driver, node string
	resourceapi.Device
}

// checkClaims reports DeviceClasses of pending claims that are missing, have a failing
// expression or match no device. It also reports pending claims for devices of this driver
// that no node can satisfy.
func checkClaims(f *Facts, say *report.List) {
	claims, known := f.Cluster.Claims.get()
	all, listed := f.Cluster.Slices.get()
	classes, have := f.Cluster.Classes.get()
	if !known || !listed || !have {
		if served, _ := f.Cluster.DRA.get(); served != "" {
			say.AddSkipped("whether claims can be satisfied: %s", firstNot(f.Cluster.Claims.unknownReason(), f.Cluster.Slices.unknownReason(), f.Cluster.Classes.unknownReason()))
		}
		return
	}
	if f.Cluster.OwnOnly != "" {
		say.AddSkipped("whether waiting claims can be satisfied: %s", f.Cluster.OwnOnly)
		return
	}
	m := newMatcher(all, classes)
	before := len(say.Findings)
	empty := make(map[string][]string)   // claims, by class without devices
	missing := make(map[string][]string) // claims, by missing class
	waiting := 0
	for i := range claims {
		claim := &claims[i]
		if claim.Status.Allocation != nil || claim.DeletionTimestamp != nil {
			continue
		}
		for _, request := range claim.Spec.Devices.Requests {
			subs := subrequestsOf(request)
			for _, s := range subs {
				if _, there := m.classes[s.class]; !there && !slices.Contains(missing[s.class], claim.Namespace+"/"+claim.Name) {
					missing[s.class] = append(missing[s.class], claim.Namespace+"/"+claim.Name)
				}
			}
			if !slices.ContainsFunc(subs, func(s subrequest) bool { return m.isOurs(s.class) }) {
				continue
			}
			waiting++
			f.request(say, m, claim, request.Name, subs, empty)
		}
	}
	for _, class := range slices.Sorted(maps.Keys(missing)) {
		say.AddFault("CH0613", "the DeviceClass "+class+" does not exist", "It is requested by "+report.JoinNames(missing[class])+". The scheduler allocates no device to a claim with a missing class. "+selectors.WhoseClass(class), selectors.RepairMissingClass(class, slices.Collect(maps.Keys(m.classes)))...)
	}
	for _, class := range slices.Sorted(maps.Keys(m.broken)) {
		c, err := m.classes[class], m.broken[class]
		say.AddFault("CH0614", "the expression of the DeviceClass "+class+" fails", "Scheduling fails for every pod that requests the class as soon as the scheduler evaluates such a device. The error is: "+asSentence(oneLine(err)), selectors.RepairClass(&c, err, m.deviceSpecs())...)
	}
	for _, class := range slices.Sorted(maps.Keys(empty)) {
		if m.broken[class] != nil {
			continue
		}
		cause := "No device of any node matches, and the class is requested by " + report.JoinNames(empty[class]) + "."
		say.AddFault("CH0609", "the DeviceClass "+class+" matches no device", cause, "kubectl get deviceclass "+class+" -o yaml", "kubectl get resourceslices -o yaml | grep -A3 attributes | head -n 40")
	}
	if say.NoFaultSince(before) && waiting > 0 {
		say.AddOK("the devices can satisfy every waiting claim")
	}
}

func firstNot(reasons ...string) string {
	for _, why := range reasons {
		if why != "" {
			return why
		}
	}
	return ""
}

// request checks one request of a claim.
func (f *Facts) request(say *report.List, m *matcher, claim *resourceapi.ResourceClaim, name string, subs []subrequest, empty map[string][]string) {
	why := ""
	for _, s := range subs {
		of := m.devicesOf(s.class)
		if len(of) == 0 {
			if m.isOurs(s.class) && !slices.Contains(empty[s.class], claim.Namespace+"/"+claim.Name) {
				empty[s.class] = append(empty[s.class], claim.Namespace+"/"+claim.Name)
			}
			continue
		}
		left := of
		for _, selector := range s.selectors {
			if selector.CEL != nil {
				var err error
				if left, err = match(left, selector.CEL.Expression); err != nil && len(left) == 0 {
					why = fmt.Sprintf("the selector %s fails: %s. A claim cannot be changed: create a new one, or change its template: %s", selector.CEL.Expression, oneLine(err), selectors.RepairExpression(s.selectors, err, m.deviceSpecs()))
					break
				}
			}
			if len(left) == 0 && selector.CEL != nil {
				why = fmt.Sprintf("none of the %d devices of class %s satisfies %s", len(of), s.class, selector.CEL.Expression)
				break
			}
		}
		if int64(perNode(left)) >= s.count {
			return
		}
		if len(left) > 0 {
			why = fmt.Sprintf("no node has %d such devices; the maximum is %d", s.count, perNode(left))
		}
	}
	if why == "" {
		return // the class has no devices, which checkClaims reports
	}
	say.AddFault("CH0610", fmt.Sprintf("claim %s/%s can never be satisfied", claim.Namespace, claim.Name), fmt.Sprintf("Request %s: %s.", name, why),
		fmt.Sprintf("kubectl -n %s get resourceclaim %s -o yaml", claim.Namespace, claim.Name), "kubectl get resourceslices --field-selector spec.driver=chandler.dev -o yaml")
}

// perNode returns the highest number of the devices on one node.
func perNode(devices []published) (most int) {
	counts := make(map[string]int)
	for _, d := range devices {
		counts[d.node]++
		most = max(most, counts[d.node])
	}
	return most
}

// subrequest is one alternative of a request.
type subrequest struct {
	class     string
	selectors []resourceapi.DeviceSelector
	count     int64
}

func subrequestsOf(request resourceapi.DeviceRequest) (subs []subrequest) {
	count := func(mode resourceapi.DeviceAllocationMode, n int64) int64 {
		if mode == resourceapi.DeviceAllocationModeAll {
			return 1
		}
		return max(n, 1)
	}
	if e := request.Exactly; e != nil {
		subs = append(subs, subrequest{e.DeviceClassName, e.Selectors, count(e.AllocationMode, e.Count)})
	}
	for _, s := range request.FirstAvailable {
		subs = append(subs, subrequest{s.DeviceClassName, s.Selectors, count(s.AllocationMode, s.Count)})
	}
	return subs
}

// matcher selects devices as the scheduler does, using the scheduler's own CEL package.
type matcher struct {
	devices []published
	classes map[string]resourceapi.DeviceClass
	matched map[string][]published // devices, by class
	broken  map[string]error       // errors of failing expressions, by class
}

func newMatcher(all []resourceapi.ResourceSlice, classes []resourceapi.DeviceClass) *matcher {
	m := &matcher{classes: make(map[string]resourceapi.DeviceClass), matched: make(map[string][]published), broken: make(map[string]error)}
	for _, class := range classes {
		m.classes[class.Name] = class
	}
	for i := range all {
		s := &all[i].Spec
		node := ""
		if s.NodeName != nil {
			node = *s.NodeName
		}
		for _, d := range s.Devices {
			m.devices = append(m.devices, published{s.Driver, node, d})
		}
	}
	return m
}

// isOurs reports whether a class is for this driver.
func (m *matcher) isOurs(class string) bool {
	c, known := m.classes[class]
	return known && forThisDriver(c)
}

// devicesOf returns the devices of a class.
func (m *matcher) devicesOf(name string) []published {
	if devices, done := m.matched[name]; done {
		return devices
	}
	class, known := m.classes[name]
	if !known {
		return nil
	}
	devices := m.devices
	for _, selector := range class.Spec.Selectors {
		if selector.CEL == nil {
			continue
		}
		var err error
		if devices, err = match(devices, selector.CEL.Expression); err != nil {
			m.broken[name] = err
		}
	}
	m.matched[name] = devices
	return devices
}

// deviceSpecs returns all devices as published.
func (m *matcher) deviceSpecs() (all []resourceapi.Device) {
	for _, d := range m.devices {
		all = append(all, d.Device)
	}
	return all
}

// oneLine returns the text of an error without line breaks.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", " ") }

// match returns the devices that satisfy an expression. The error is the compilation error, or
// the last evaluation error for a device of this driver. The scheduler aborts on such an
// error.
func match(devices []published, expression string) (left []published, failed error) {
	newExpressions := environment.NewExpressions
	compiled := dracel.GetCompiler(dracel.Features{EnableConsumableCapacity: true}).CompileCELExpression(expression, dracel.Options{EnvType: &newExpressions})
	if compiled.Error != nil {
		return nil, compiled.Error
	}
	for _, d := range devices {
		ok, _, err := compiled.DeviceMatches(context.Background(), dracel.Device{Driver: d.driver, AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity})
		switch {
		case err != nil && d.driver == discovery.Domain:
			failed = err
		case ok && err == nil:
			left = append(left, d)
		}
	}
	return left, failed
}
