// Package kubectl applies and deletes manifests, waits for pods and reads logs, for tests and
// demonstrations on any cluster. The error of a failed wait contains the pod's conditions,
// containers and events.
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

// interval is the time between two checks of a wait.
const interval = 50 * time.Millisecond

// A Client is a client of one cluster. It embeds the typed client for everything else.
type Client struct {
	kubernetes.Interface

	dynamic dynamic.Interface
	mapper  *restmapper.DeferredDiscoveryRESTMapper
}

// New returns a client without connecting.
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

// Apply applies the objects of a manifest by server-side apply, in order. Each YAML document is one
// object. An object without a namespace goes to "default". If a kind is not served yet, for example
// just after its definition was applied, Apply waits for it until ctx ends.
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

// DryRun sends each object of a manifest to the server as a creation with dry run, and returns the
// first error.
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

// Delete deletes the objects of a manifest in reverse order, and waits until all are gone. Missing
// objects are no error. Pods get a grace period of one second.
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
	// Without the kind, the object is gone too.
	if meta.IsNoMatchError(err) {
		return nil
	}
	if err != nil {
		return err
	}
	foreground := metav1.DeletePropagationForeground
	options := metav1.DeleteOptions{PropagationPolicy: &foreground}
	if object.GetKind() == "Pod" {
		// A grace period of zero would remove the pod from the API before the pod has ended.
		second := int64(1)
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

// DeletePod deletes a pod with the pod's own grace period, and waits until the pod is gone.
func (c *Client) DeletePod(ctx context.Context, namespace, name string) error {
	pods := c.CoreV1().Pods(namespace)
	if err := pods.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	return c.gone(ctx, "pod "+name, func() (metav1.Object, error) {
		return pods.Get(ctx, name, metav1.GetOptions{})
	})
}

// gone calls get until it returns a not-found error.
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

// WaitForPod waits until a pod is in a phase, and returns the pod. For Running, all containers must
// also be ready. It returns an error when the pod can no longer reach the phase, or when ctx ends.
// The error includes the pod's state.
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

// podIs returns nil if the pod is in the phase, or else the reason. The error is final if the pod
// cannot reach the phase.
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

// story returns a pod's conditions, containers and events as text.
func (c *Client) story(ctx context.Context, pod *corev1.Pod) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second) // The caller's context may have ended.
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

// Logs returns the output of a container so far. An empty container name selects a pod's only
// container.
func (c *Client) Logs(ctx context.Context, namespace, pod, container string) (string, error) {
	options := &corev1.PodLogOptions{Container: container}
	log, err := c.CoreV1().Pods(namespace).GetLogs(pod, options).DoRaw(ctx)
	if err != nil {
		return "", fmt.Errorf("log of pod %s: %w", pod, err)
	}
	return string(log), nil
}

// Until calls the function is repeatedly until the function returns nil or a Final error, or until
// ctx ends. In the latter two cases, the returned error wraps the function's last error.
func (c *Client) Until(ctx context.Context, what string, is func(context.Context) error) error {
	var last error // the last error that is not merely the end of ctx
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

// Final marks an error as permanent, so that Until returns it at once.
func Final(err error) error { return finalError{err} }

type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }

// resource returns the client for an object's kind and namespace.
func (c *Client) resource(object *unstructured.Unstructured) (dynamic.ResourceInterface, error) {
	kind := object.GroupVersionKind()
	mapping, err := c.mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if meta.IsNoMatchError(err) {
		c.mapper.Reset() // The next call discovers the served kinds again.
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

// parse splits a manifest into objects. It skips empty documents and replaces lists by their items.
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
