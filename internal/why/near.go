package why

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/internal/fleet"
	"chandler.dev/internal/selectors"
)

// nearDevices is the largest number of devices listed for the nearest place.
const nearDevices = 8

// codes are the codes of chandler doctor for conditions.
var codes = map[string]string{
	"unhealthy": "CH0301", "unknown": "CH0302", "gone": "CH0303", "driver-unbound": "CH0304", "node-missing": "CH0305",
	"over-temperature": "CH0306", "link-degraded": "CH0307", "fatal-errors": "CH0308",
	"not-responding": "CH0314",
}

// Codes of chandler doctor for classes.
const (
	noClass      = "CH0603" // no DeviceClass has the name
	missingClass = "CH0613"
	failingClass = "CH0614"
)

// findNearest finds the place with the fewest missing devices for the first unsatisfied request,
// and the commands that help there.
func (a *explainer) findNearest(nodes []candidate) {
	at := slices.IndexFunc(a.answer.Asked, func(r Request) bool { return !r.Enough })
	if at < 0 {
		return
	}
	r := &a.answer.Asked[at]
	if r.Class == "" {
		a.nearPlugged(r, nodes)
		return
	}
	best := a.closestGroup(a.judgedByClass[at])
	if best == nil {
		return
	}
	near := &Nearest{Where: best.where, Has: best.has}
	slices.SortStableFunc(best.devices, func(x, y judgedDevice) int { return cmp.Compare(judgedOrder(x), judgedOrder(y)) })
	for _, d := range best.devices {
		if d.removal != nil && d.removal.order < byTaint {
			continue
		}
		item := Near{Device: *d.Device}
		if d.removal != nil {
			item.Why = reasonOf(d)
		}
		near.Devices = append(near.Devices, item)
	}
	a.answer.Nearest = near
	a.fix(r, best)
	if len(near.Devices) > nearDevices {
		near.Devices = near.Devices[:nearDevices]
	}
}

func judgedOrder(d judgedDevice) int {
	if d.removal == nil {
		return 0
	}
	return d.removal.order
}

func reasonOf(d judgedDevice) string {
	if d.removal.byConsumer && strings.TrimSpace(d.removal.consumer) != "" {
		return d.removal.condition + ": " + d.removal.consumer
	}
	return d.removal.condition
}

// group is a set of devices on one node, with a common attribute if the request requires one.
type group struct {
	where   string
	has     int64
	known   int64 // including devices that may become available
	devices []judgedDevice
}

// grouped is a set of devices with the attribute that they must have in common, or "".
type grouped struct {
	devices   []judgedDevice
	attribute resourceapi.FullyQualifiedName
}

// closestGroup returns the group with the most available devices, or nil if there is no group.
func (a *explainer) closestGroup(g grouped) *group {
	groups := make(map[string]*group)
	var names []string
	for _, d := range g.devices {
		if d.removal != nil && d.removal.order < byTaint {
			continue
		}
		where := d.Node
		if g.attribute != "" {
			value := fleet.Text(&d.Spec, resourceapi.QualifiedName(g.attribute))
			if value == "" {
				continue
			}
			where = fmt.Sprintf("%s, %s %s", d.Node, placeName(g.attribute), value)
		}
		if groups[where] == nil {
			groups[where] = &group{where: where}
			names = append(names, where)
		}
		in := groups[where]
		in.devices = append(in.devices, d)
		in.known++
		if d.removal == nil {
			in.has++
		}
	}
	if len(names) == 0 {
		return nil
	}
	slices.Sort(names)
	best := slices.MaxFunc(names, func(x, y string) int {
		return cmp.Or(cmp.Compare(groups[x].has, groups[y].has), cmp.Compare(groups[x].known, groups[y].known), strings.Compare(y, x))
	})
	return groups[best]
}

// fix adds commands after which a group has enough devices.
func (a *explainer) fix(r *Request, best *group) {
	missing := r.Count - best.has
	if r.All {
		missing = best.known - best.has
	}
	if missing > best.known-best.has {
		return // even all of them are not enough
	}
	var pods []string
	for _, d := range best.devices {
		if d.removal == nil || missing <= 0 {
			continue
		}
		missing--
		if code := codes[d.removal.condition]; code != "" {
			a.addFixes("kubectl chandler explain " + code)
		}
		if d.removal.order == byTaint && strings.Contains(d.removal.condition, "/") {
			// The taint keeps the device unavailable even after its release.
			a.addFixes("kubectl get devicetaintrules   # one may have set the taint " + d.removal.condition)
			continue
		}
		for _, h := range d.BlockingHolders() {
			if h.Pod != "" {
				pods = append(pods, fmt.Sprintf("kubectl -n %s delete pod %s   # when that may end", h.Namespace, h.Pod))
			}
		}
	}
	a.addFixes(pods...)
}

// addFixes adds commands to the answer, without duplicates.
func (a *explainer) addFixes(commands ...string) {
	for _, command := range commands {
		if !slices.Contains(a.answer.Fix, command) {
			a.answer.Fix = append(a.answer.Fix, command)
		}
	}
}

// repairName adds commands for a missing object that the pod refers to. Users can still create the
// object, but they cannot change the pod.
func (a *explainer) repairName(kind, name string, there []string) {
	of := fmt.Sprintf("kubectl -n %s ", a.pod.Namespace)
	if meant := selectors.NearestWord(name, there); meant != "" {
		a.addFixes(of + "get " + kind + " " + meant + "   # is this one meant? Then make the pod anew")
	}
	a.addFixes(of + "get " + kind + "s   # shows the names that there are")
}

// names returns the names of the objects in a namespace.
func names[T any, P interface {
	*T
	metav1.Object
}](objects []T, namespace string) (out []string) {
	for i := range objects {
		if o := P(&objects[i]); o.GetNamespace() == namespace {
			out = append(out, o.GetName())
		}
	}
	return out
}

// repairClaim adds a command for a request whose selector fails. Claims are immutable, so the user
// must replace the claim.
func (a *explainer) repairClaim(alt *alternative, failed error) {
	a.addFixes(fmt.Sprintf("kubectl -n %s get resourceclaim %s -o yaml   # write it, or its template, anew: %s", a.pod.Namespace, alt.claim.Name, selectors.RepairExpression(alt.exactly.Selectors, failed, a.deviceSpecs())))
}

// deviceSpecs returns all devices as published.
func (a *explainer) deviceSpecs() (all []resourceapi.Device) {
	for i := range a.fleet.Devices {
		all = append(all, a.fleet.Devices[i].Spec)
	}
	return all
}

// nearPlugged finds the node with the most free devices of a device plugin resource.
func (a *explainer) nearPlugged(r *Request, nodes []candidate) {
	var best *fleet.Resource
	for i := range nodes {
		if nodes[i].refusedReason != "" {
			continue
		}
		if offer := a.pluginResource(nodes[i].Name, corev1.ResourceName(r.Resource)); offer != nil && (best == nil || offer.Free() > best.Free()) {
			best = offer
		}
	}
	if best == nil {
		if a.classOf(corev1.ResourceName(r.Resource)) == nil {
			if meant := selectors.NearestWord(r.Resource, a.limitNames()); meant != "" {
				a.addFixes(fmt.Sprintf("kubectl -n %s get pod %s -o yaml   # it asks for %s: is %s meant?", a.pod.Namespace, a.pod.Name, r.Resource, meant))
			}
			a.addFixes("kubectl chandler explain " + noClass)
		}
		return
	}
	a.answer.Nearest = &Nearest{Where: best.Node, Has: best.Free()}
	if missing := r.Count - best.Free(); missing <= best.Held {
		for _, h := range best.Holders {
			if missing > 0 {
				missing -= h.Count
				a.answer.Fix = append(a.answer.Fix, fmt.Sprintf("kubectl -n %s delete pod %s   # when that may end", h.Namespace, h.Pod))
			}
		}
	}
}
