package agent

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/backoff"
)

// Intervals between lists of the DeviceClasses, which are the largest answer that the agent requests.
// The warnings are not urgent. The agents of a cluster list at different times.
const (
	firstClasses  = 5 * time.Minute // approximate time from the start to the first list
	classInterval = time.Hour       // approximate interval of the lists
	classPause    = time.Minute     // shortest time between two lists, which a claim of an unknown class may request
)

// classCheck warns if pods with "limits" cannot get their devices because of the DeviceClasses. If
// several classes have the same extended resource name, only one class serves the name, and that
// class may belong to another driver. If no class has the name, DRA does not serve it. If no class
// selects a device, no claim can request it, unless the claim's class is created later. API servers
// without the feature gate DRAExtendedResource drop the name, which is the default before
// Kubernetes 1.36.
type classCheck struct {
	client *draclient.Client

	// offered returns the devices that DRA offers, and false while they are unknown.
	offered func() ([]rules.Offered, bool)

	resources atomic.Pointer[map[string]string] // extended resource names by class, nil before the first list
	unknown   chan struct{}                     // has a value when a claim has a class that is not in the last list
	logged    map[string]bool                   // warnings that still apply
}

// resourceOf returns the extended resource name of a class, according to the last list. If the class
// is unknown, resourceOf returns "" and requests another list.
func (c *classCheck) resourceOf(class string) string {
	if of := c.resources.Load(); of != nil {
		if resource, known := (*of)[class]; known {
			return resource
		}
	}
	notify(c.unknown)
	return ""
}

// resourcesOf returns, by class, the extended resource name that pods put in their limits. A class
// without a name in its spec has the implicit name that Kubernetes defines.
func resourcesOf(classes []resourceapi.DeviceClass) map[string]string {
	of := make(map[string]string, len(classes))
	for i := range classes {
		class := &classes[i]
		of[class.Name] = resourceapi.ResourceDeviceClassPrefix + class.Name
		if name := class.Spec.ExtendedResourceName; name != nil {
			of[class.Name] = *name
		}
	}
	return of
}

// run warns whenever a list of the classes leads to a new warning. It lists them about an hour apart,
// and sooner for a claim of an unknown class. It returns when the context ends.
func (c *classCheck) run(ctx context.Context) {
	about, pause := firstClasses, backoff.NewPause()
	for ctx.Err() == nil {
		waitFor(ctx, c.unknown, about*3/4+rand.N(about/2))
		offered, known := c.offered()
		if known && ctx.Err() == nil {
			known = c.warn(ctx, offered)
		}
		if !known {
			about = pause.Step()
			continue
		}
		about, pause = classInterval, backoff.NewPause()
		waitFor(ctx, nil, classPause)
	}
}

// warn lists the classes and logs the warnings. It reports whether the API server has answered.
func (c *classCheck) warn(ctx context.Context, offered []rules.Offered) bool {
	ask, cancel := context.WithTimeout(ctx, cluster.AskTimeout)
	defer cancel()
	// A response from the API server's cache is fresh enough and costs little.
	classes, err := c.client.DeviceClasses().List(ask, metav1.ListOptions{ResourceVersion: "0"})
	if apierrors.IsNotFound(err) {
		return true
	}
	if err != nil {
		klog.FromContext(ctx).V(2).Info("DeviceClasses cannot be read", "reason", err)
		return false
	}
	of := resourcesOf(classes.Items)
	c.resources.Store(&of)
	said := make(map[string]bool)
	warn := func(message string, keysAndValues ...any) {
		text := fmt.Sprint(message, keysAndValues)
		if said[text] = true; !c.logged[text] {
			klog.FromContext(ctx).Info("Warning: "+message, keysAndValues...)
		}
	}
	for _, clash := range findClashes(classes.Items) {
		warn("DeviceClasses have the same extendedResourceName; pods that request it get devices of the first one",
			"extendedResourceName", clash.resource, "deviceClasses", clash.classes)
	}
	for _, name := range withoutClass(classes.Items, offered) {
		warn("DRA offers devices under a name that no DeviceClass has as its extendedResourceName; "+
			"pods that ask for it by limits wait. The API server drops that field without the feature gate DRAExtendedResource; mode DevicePlugin serves such pods",
			"extendedResourceName", name)
	}
	families := rules.FamiliesWithoutClass(classes.Items, offered) //nolint:contextcheck // evaluating an expression does not block
	if len(families) > 0 {
		warn("No DeviceClass selects devices that DRA offers, so claims cannot request them; the chart creates the classes of the families in deviceClasses.families",
			"families", families)
	}
	c.logged = said
	return true
}

// withoutClass returns, sorted, the extended resource names of devices that DRA offers and no class
// serves.
func withoutClass(classes []resourceapi.DeviceClass, offered []rules.Offered) (names []string) {
	served := func(name string) bool {
		return slices.ContainsFunc(classes, func(class resourceapi.DeviceClass) bool {
			return class.Spec.ExtendedResourceName != nil && *class.Spec.ExtendedResourceName == name
		})
	}
	for _, d := range offered {
		for _, offer := range d.Offers {
			if !slices.Contains(names, offer.Resource) && !served(offer.Resource) {
				names = append(names, offer.Resource)
			}
		}
	}
	slices.Sort(names)
	return names
}

// A clash is an extended resource name that several classes have.
type clash struct {
	resource string
	classes  []string // in the scheduler's order of preference
}

// findClashes returns the clashes that involve a class for this driver, sorted by name.
func findClashes(classes []resourceapi.DeviceClass) []clash {
	byResource := make(map[string][]resourceapi.DeviceClass)
	for _, class := range classes {
		if name := class.Spec.ExtendedResourceName; name != nil {
			byResource[*name] = append(byResource[*name], class)
		}
	}
	var found []clash
	for resource, classes := range byResource {
		if len(classes) < 2 || !slices.ContainsFunc(classes, forThisDriver) {
			continue
		}
		slices.SortFunc(classes, byPrecedence)
		c := clash{resource: resource}
		for _, class := range classes {
			c.classes = append(c.classes, class.Name)
		}
		found = append(found, c)
	}
	slices.SortFunc(found, func(a, b clash) int { return strings.Compare(a.resource, b.resource) })
	return found
}

// byPrecedence sorts the class first that the scheduler takes: the newest, and of equally new
// classes the first by name (DeviceClassSpec.ExtendedResourceName).
func byPrecedence(a, b resourceapi.DeviceClass) int {
	return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
}

// forThisDriver reports whether an expression of the class contains the driver's name, as the names
// of device attributes do.
func forThisDriver(class resourceapi.DeviceClass) bool {
	return slices.ContainsFunc(class.Spec.Selectors, func(s resourceapi.DeviceSelector) bool {
		return s.CEL != nil && strings.Contains(s.CEL.Expression, discovery.Domain)
	})
}
