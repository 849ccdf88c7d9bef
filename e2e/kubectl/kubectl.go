// Package kubectl does from Go what one does with kubectl: apply manifests, wait for pods, read logs, delete. It is
// for tests and demonstrations against any cluster, and what it says when a wait fails is meant to be the whole story.
package kubectl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
)

// fieldManager owns the fields that Apply sets.
const fieldManager = "chandler-e2e"

// interval between two looks at what is waited for.
const interval = 50 * time.Millisecond

// A Client speaks to one cluster. It is also the typed client, for all that has no method here.
type Client struct {
	kubernetes.Interface

	dynamic dynamic.Interface
	mapper  *restmapper.DeferredDiscoveryRESTMapper
}

// New returns a client; it does not connect yet.
func New(config *rest.Config) (*Client, error) {
	config = rest.CopyConfig(config)
	config.WarningHandler = rest.NewWarningWriter(os.Stderr, rest.WarningWriterOptions{Deduplicate: true})
	typed, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	untyped, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(typed.Discovery()))
	return &Client{Interface: typed, dynamic: untyped, mapper: mapper}, nil
}

// Apply applies the objects of a manifest, one YAML document each, in order and on the server's side. An object
// without a namespace goes to "default". Where a kind is not served yet, as just after its definition was applied,
// Apply waits for it until ctx ends.
func (c *Client) Apply(ctx context.Context, manifest string) error {
	objects, err := parse(manifest)
	if err != nil {
		return fmt.Errorf("apply: %w", err)
	}
	for _, object := range objects {
		if err := c.apply(ctx, object); err != nil {
			return fmt.Errorf("apply %s: %w", describe(object), err)
		}
	}
	return nil
}

// ApplyFiles applies the manifests in files, in order.
func (c *Client) ApplyFiles(ctx context.Context, paths ...string) error {
	for _, path := range paths {
		manifest, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if err := c.Apply(ctx, string(manifest)); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

func (c *Client) apply(ctx context.Context, object *unstructured.Unstructured) error {
	var resource dynamic.ResourceInterface
	err := c.Until(ctx, "kind "+object.GetKind(), func(context.Context) (err error) {
		resource, err = c.resource(object)
		if err != nil && !meta.IsNoMatchError(err) {
			return Final(err)
		}
		return err
	})
	if err != nil {
		return err
	}
	_, err = resource.Apply(ctx, object.GetName(), object, metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
	return err
}

// DryRun asks the server whether it would create each object of a manifest, and returns the answer for the first that it
// would not.
func (c *Client) DryRun(ctx context.Context, manifest string) error {
	objects, err := parse(manifest)
	if err != nil {
		return fmt.Errorf("dry run: %w", err)
	}
	for _, object := range objects {
		resource, err := c.resource(object)
		if err == nil {
			_, err = resource.Create(ctx, object, metav1.CreateOptions{FieldManager: fieldManager, DryRun: []string{metav1.DryRunAll}})
		}
		if err != nil {
			return fmt.Errorf("dry run of %s: %w", describe(object), err)
		}
	}
	return nil
}

// Delete deletes the objects of a manifest, the last one first, and waits until all are gone. It is no error if
// one is missing. Pods are given one second.
func (c *Client) Delete(ctx context.Context, manifest string) error {
	objects, err := parse(manifest)
	if err != nil {
		return fmt.Errorf("delete: %w", err)
	}
	for i := len(objects) - 1; i >= 0; i-- {
		if err := c.delete(ctx, objects[i]); err != nil {
			return fmt.Errorf("delete %s: %w", describe(objects[i]), err)
		}
	}
	return nil
}

func (c *Client) delete(ctx context.Context, object *unstructured.Unstructured) error {
	resource, err := c.resource(object)
	if meta.IsNoMatchError(err) { // its kind is gone, and it too
		return nil
	}
	if err != nil {
		return err
	}
	foreground := metav1.DeletePropagationForeground
	options := metav1.DeleteOptions{PropagationPolicy: &foreground}
	if object.GetKind() == "Pod" {
		second := int64(1) // zero would take the pod from the API before it has ended
		options.GracePeriodSeconds = &second
	}
	err = resource.Delete(ctx, object.GetName(), options)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return c.gone(ctx, describe(object), func() (metav1.Object, error) {
		return resource.Get(ctx, object.GetName(), metav1.GetOptions{})
	})
}

// DeletePod deletes a pod as its grace period says and waits until it is gone.
func (c *Client) DeletePod(ctx context.Context, namespace, name string) error {
	pods := c.CoreV1().Pods(namespace)
	if err := pods.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	return c.gone(ctx, "pod "+name, func() (metav1.Object, error) {
		return pods.Get(ctx, name, metav1.GetOptions{})
	})
}

// gone waits until get does not find what it gets.
func (c *Client) gone(ctx context.Context, what string, get func() (metav1.Object, error)) error {
	return c.Until(ctx, what+" to be gone", func(context.Context) error {
		left, err := get()
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return err
		}
		return fmt.Errorf("still there, with finalizers %q", left.GetFinalizers())
	})
}

// WaitForPod waits until a pod is in a phase, and returns it so. Running includes that all its containers are ready.
// It gives up when the pod can no longer come to it, or ctx ends, and then tells what the pod waits for.
func (c *Client) WaitForPod(ctx context.Context, namespace, name string, phase corev1.PodPhase) (*corev1.Pod, error) {
	var pod *corev1.Pod
	err := c.Until(ctx, fmt.Sprintf("pod %s to be %s", name, phase), func(ctx context.Context) error {
		got, err := c.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		pod = got
		return podIs(pod, phase)
	})
	if err != nil && pod != nil {
		return pod, fmt.Errorf("%w%s", err, c.story(context.WithoutCancel(ctx), pod))
	}
	return pod, err
}

// podIs returns nil if the pod is in the phase, else what keeps it from it; that may be final.
func podIs(pod *corev1.Pod, phase corev1.PodPhase) error {
	switch current := pod.Status.Phase; {
	case current != phase && (current == corev1.PodSucceeded || current == corev1.PodFailed):
		return Final(fmt.Errorf("it is %s: %s %s", current, pod.Status.Reason, pod.Status.Message))
	case current != phase:
		return fmt.Errorf("it is %s", current)
	case phase == corev1.PodRunning && !podReady(pod):
		return errors.New("it is not ready")
	}
	return nil
}

func podReady(pod *corev1.Pod) bool {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}

// story is what is known of a pod: its conditions, containers and events.
func (c *Client) story(ctx context.Context, pod *corev1.Pod) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second) // the caller's context may have ended
	defer cancel()
	var story strings.Builder
	for _, condition := range pod.Status.Conditions {
		if condition.Status != corev1.ConditionTrue {
			fmt.Fprintf(&story, "\n  %s=%s %s: %s", condition.Type, condition.Status, condition.Reason, condition.Message)
		}
	}
	for _, status := range append(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses...) {
		if waiting := status.State.Waiting; waiting != nil {
			fmt.Fprintf(&story, "\n  container %s waits: %s: %s", status.Name, waiting.Reason, waiting.Message)
		}
		if ended := status.State.Terminated; ended != nil {
			fmt.Fprintf(&story, "\n  container %s ended with %d: %s %s", status.Name, ended.ExitCode, ended.Reason, ended.Message)
		}
	}
	events, err := c.CoreV1().Events(pod.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(pod.UID)})
	if err != nil {
		return story.String()
	}
	for _, event := range events.Items {
		fmt.Fprintf(&story, "\n  event %s: %s", event.Reason, event.Message)
	}
	return story.String()
}

// Logs returns what a container has written so far; "" is a pod's only container.
func (c *Client) Logs(ctx context.Context, namespace, pod, container string) (string, error) {
	options := &corev1.PodLogOptions{Container: container}
	log, err := c.CoreV1().Pods(namespace).GetLogs(pod, options).DoRaw(ctx)
	if err != nil {
		return "", fmt.Errorf("log of pod %s: %w", pod, err)
	}
	return string(log), nil
}

// Until asks again and again whether something is so, until it is, the answer is Final, or ctx ends; the last answer
// is then in the error.
func (c *Client) Until(ctx context.Context, what string, is func(context.Context) error) error {
	var last error // that says more than that the time is over
	for {
		err := is(ctx)
		if err == nil {
			return nil
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		if final := (finalError{}); errors.As(err, &final) {
			return fmt.Errorf("wait for %s: %w", what, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w; last: %w", what, context.Cause(ctx), last)
		case <-time.After(interval):
		}
	}
}

// Final marks an answer given to Until as one that will not change.
func Final(err error) error { return finalError{err} }

type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }

// resource returns the client for an object's kind and namespace.
func (c *Client) resource(object *unstructured.Unstructured) (dynamic.ResourceInterface, error) {
	kind := object.GroupVersionKind()
	mapping, err := c.mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if meta.IsNoMatchError(err) {
		c.mapper.Reset() // so that the next call asks again what is served
	}
	if err != nil {
		return nil, err
	}
	resource := c.dynamic.Resource(mapping.Resource)
	if mapping.Scope.Name() != meta.RESTScopeNameNamespace {
		return resource, nil
	}
	namespace := object.GetNamespace()
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	return resource.Namespace(namespace), nil
}

// parse splits a manifest into objects; empty documents do not count, lists are their items.
func parse(manifest string) ([]*unstructured.Unstructured, error) {
	decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewBufferString(manifest), 4096)
	var objects []*unstructured.Unstructured
	for {
		object := &unstructured.Unstructured{}
		err := decoder.Decode(object)
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", len(objects)+1, err)
		}
		if object.Object == nil {
			continue
		}
		if !object.IsList() {
			objects = append(objects, object)
			continue
		}
		list, err := object.ToList()
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", len(objects)+1, err)
		}
		for i := range list.Items {
			objects = append(objects, &list.Items[i])
		}
	}
}

func describe(object *unstructured.Unstructured) string {
	return object.GetKind() + " " + object.GetName()
}
