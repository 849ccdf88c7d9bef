package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
)

// classInterval is how often the agent looks at DeviceClasses: nothing waits
// for what it says of them.
const classInterval = 10 * time.Minute

// classCheck warns of DeviceClasses that share an extended resource name, of
// which one is for this driver: a pod's "limits" are then served by only one of
// them, which may be the other driver's.
type classCheck struct {
	client *draclient.Client
	last   map[string]string // what was said
}

// run warns at once, and again when what there is to say has changed.
func (c *classCheck) run(ctx context.Context) {
	for {
		c.warn(ctx)
		select {
		case <-ctx.Done():
			return
		case <-time.After(classInterval):
		}
	}
}

func (c *classCheck) warn(ctx context.Context) {
	ask, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	// Of the API server's cache, which is new enough and costs it little.
	classes, err := c.client.DeviceClasses().List(ask, metav1.ListOptions{ResourceVersion: "0"})
	if apierrors.IsNotFound(err) {
		return
	}
	if err != nil {
		klog.FromContext(ctx).V(2).Info("DeviceClasses cannot be looked at", "reason", err)
		return
	}
	now := make(map[string]string)
	for _, clash := range clashes(classes.Items) {
		now[clash.resource] = fmt.Sprint(clash.classes)
		if c.last[clash.resource] != now[clash.resource] {
			klog.FromContext(ctx).Info("Warning: DeviceClasses have one extendedResourceName; pods that ask for it get devices of the first of them",
				"extendedResourceName", clash.resource, "deviceClasses", clash.classes)
		}
	}
	c.last = now
}

// A clash is an extended resource name that several classes have.
type clash struct {
	resource string
	classes  []string // first the one that the scheduler takes
}

// clashes returns the clashes in which a class for this driver has part, by
// name.
func clashes(classes []resourceapi.DeviceClass) []clash {
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

// byPrecedence puts first the class that the scheduler takes: the newest, of
// those the one whose name comes first (DeviceClassSpec.ExtendedResourceName).
func byPrecedence(a, b resourceapi.DeviceClass) int {
	return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
}

// forThisDriver reports whether an expression of the class names the driver, or
// an attribute of its devices.
func forThisDriver(class resourceapi.DeviceClass) bool {
	return slices.ContainsFunc(class.Spec.Selectors, func(s resourceapi.DeviceSelector) bool {
		return s.CEL != nil && strings.Contains(s.CEL.Expression, discovery.Domain)
	})
}
