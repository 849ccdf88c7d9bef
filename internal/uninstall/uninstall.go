// Package uninstall removes the agents of a cluster from their nodes: it gives them the orders of
// package removal and waits for their answers.
package uninstall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"chandler.dev/discovery"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/removal"
)

// Defaults of the commands.
const (
	DefaultNamespace = "chandler"
	DefaultTimeout   = 4 * time.Minute
)

// Help describes the commands.
const Help = `Remove all agents from their nodes, so that Chandler can be deleted. "helm uninstall"
runs this command before it deletes anything.

While a device is allocated to a pod or a claim, the command fails, names the pod, and
changes nothing: without an agent, such a pod could neither restart nor terminate.
Otherwise, the agents stop offering devices. When no device is allocated, each agent
deletes the ResourceSlices of its node, its files and its sockets, and waits to be
deleted. After that, only the agent's pod remains on a node.

If the command fails, the agents offer devices again. If it is killed, they do so after
a minute, or, if they have already left their nodes, when you withdraw the request:

  kubectl -n chandler annotate configmap chandler chandler.dev/removal-`

// Run removes the agents of a namespace from their nodes, and prints its progress. If the agents do
// not leave within the timeout, they continue as before.
func Run(ctx context.Context, client kubernetes.Interface, namespace string, timeout time.Duration, out io.Writer) error {
	return newUninstaller(client, namespace, out).run(ctx, timeout)
}

// endingPatience is how long agents may take to notice that a pod was deleted: they query
// PodResources every 5 s.
const endingPatience = 7 * time.Second

// agentSets selects the agents' DaemonSets: one for each group of nodes.
const agentSets = "app.kubernetes.io/name=chandler"

// uninstaller removes the agents of a namespace from their nodes.
type uninstaller struct {
	client    kubernetes.Interface
	namespace string
	out       io.Writer

	order      removal.Order
	lastOrder  time.Time
	interval   time.Duration // the time between two checks
	settleTime time.Duration // how long a scheduler may still allocate devices of deleted slices
}

func newUninstaller(client kubernetes.Interface, namespace string, out io.Writer) *uninstaller {
	return &uninstaller{client: client, namespace: namespace, out: out, interval: time.Second, settleTime: 3 * time.Second}
}

// run removes Chandler from all nodes. If it succeeds, the order remains, so that an agent that
// starts before the DaemonSet is deleted leaves too.
func (u *uninstaller) run(ctx context.Context, timeout time.Duration) (err error) {
	sets, err := u.daemonSets(ctx)
	if err != nil {
		return fmt.Errorf("find the agents: %w", err)
	}
	if len(sets) == 0 {
		u.printf("There is no DaemonSet of agents in namespace %s, so there are no agents to remove.", u.namespace)
		return nil
	}
	if err := u.checkClaims(ctx); err != nil {
		return err
	}
	limited, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("the agents did not answer within %s", timeout))
	defer cancel()
	u.order = removal.Order{Phase: removal.Withhold, ID: string(uuid.NewUUID())}
	defer func() {
		if err != nil {
			err = errors.Join(err, u.takeBack(context.WithoutCancel(ctx)))
		}
	}()
	u.printf("The agents stop offering devices.")
	if err := u.orderState(limited, removal.Withheld); err != nil {
		return err
	}
	if err := u.noSlices(limited); err != nil {
		return err
	}
	if err := u.checkClaims(limited); err != nil {
		return err
	}
	u.printf("No device is allocated. The agents leave their nodes.")
	u.order.Phase = removal.Remove
	if err := u.orderState(limited, removal.Removed); err != nil {
		return err
	}
	if err := u.noSlices(limited); err != nil {
		return err
	}
	if err := u.checkClaims(limited); err != nil {
		return err
	}
	u.printf("Only the agents' pods remain on the nodes.")
	return nil
}

// takeBack revokes the order, so that the agents continue as before.
func (u *uninstaller) takeBack(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if err := removal.WriteOrder(ctx, u.client, u.namespace, removal.Order{}); err != nil {
		return fmt.Errorf("the agents still have the request to stop; withdraw it with kubectl -n %s annotate configmap %s %s-: %w",
			u.namespace, removal.ConfigMap, removal.Annotation, err)
	}
	u.printf("The agents go on offering devices.")
	return nil
}

// orderState gives the order and waits until all agents are in a state.
func (u *uninstaller) orderState(ctx context.Context, want removal.State) error {
	u.lastOrder = time.Time{}
	return u.until(ctx, func(ctx context.Context) error { return u.all(ctx, want) })
}

// until renews the order and calls look until there is no error or a final one. A device in use is
// final only after endingPatience, because its pod may just have been deleted.
func (u *uninstaller) until(ctx context.Context, look func(context.Context) error) error {
	begun := time.Now()
	for {
		err := u.renewOrder(ctx)
		if err == nil {
			err = look(ctx)
		}
		var still *inUse
		if err == nil || errors.As(err, &still) && time.Since(begun) >= endingPatience {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-time.After(u.interval):
		}
	}
}

// renewOrder gives the order again if the last time was too long ago.
func (u *uninstaller) renewOrder(ctx context.Context) error {
	if time.Since(u.lastOrder) < removal.Beat {
		return nil
	}
	u.order.Beat++
	if err := removal.WriteOrder(ctx, u.client, u.namespace, u.order); err != nil {
		return fmt.Errorf("give the agents the order: %w", err)
	}
	u.lastOrder = time.Now()
	return nil
}

// daemonSets lists the DaemonSets of the agents.
func (u *uninstaller) daemonSets(ctx context.Context) ([]appsv1.DaemonSet, error) {
	sets, err := u.client.AppsV1().DaemonSets(u.namespace).List(ctx, metav1.ListOptions{LabelSelector: agentSets})
	if err != nil {
		return nil, err
	}
	return sets.Items, nil
}

// all returns nil if all agents are in a state. For devices in use, the error is an *inUse.
func (u *uninstaller) all(ctx context.Context, want removal.State) error {
	sets, err := u.daemonSets(ctx)
	if err != nil {
		return err
	}
	pods, err := u.client.CoreV1().Pods(u.namespace).List(ctx, metav1.ListOptions{LabelSelector: agentSets})
	if err != nil {
		return err
	}
	var used inUse
	var waiting []string
	count := make(map[string]int) // the number of agents of each DaemonSet
	agents := slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool {
		return !slices.ContainsFunc(sets, func(set appsv1.DaemonSet) bool { return metav1.IsControlledBy(&p, &set) })
	})
	for i := range agents {
		count[metav1.GetControllerOf(&agents[i]).Name]++
		pod := &agents[i]
		switch report, told := removal.ReportOf(pod); {
		case !told || report.ID != u.order.ID:
			waiting = append(waiting, fmt.Sprintf("pod %s on node %s has not answered", pod.Name, pod.Spec.NodeName))
		case report.State == removal.InUse:
			used.users = append(used.users, fmt.Sprintf("node %s: %s", pod.Spec.NodeName, report.Detail))
		case report.State != want:
			waiting = append(waiting, fmt.Sprintf("pod %s on node %s is %s: %s", pod.Name, pod.Spec.NodeName, report.State, report.Detail))
		}
	}
	switch {
	case waiting != nil:
		return errors.New(strings.Join(append(waiting, used.users...), "; "))
	case used.users != nil:
		return &used
	}
	for i := range sets {
		if err := rolledOut(&sets[i], count[sets[i].Name]); err != nil {
			return err
		}
	}
	return nil
}

// rolledOut returns an error unless a DaemonSet has one pod on each of its nodes.
func rolledOut(set *appsv1.DaemonSet, pods int) error {
	if s := set.Status; s.ObservedGeneration < set.Generation || pods != int(s.DesiredNumberScheduled) {
		return fmt.Errorf("the DaemonSet %s has %d pods and is to have %d: an upgrade is going on, or a node is not there", set.Name, pods, s.DesiredNumberScheduled)
	}
	return nil
}

// noSlices waits until the API server has no devices of the driver, and then until schedulers can
// no longer allocate them.
func (u *uninstaller) noSlices(ctx context.Context) error {
	err := u.until(ctx, func(ctx context.Context) error {
		list, err := draclient.New(u.client).ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + discovery.Domain})
		if apierrors.IsNotFound(err) { // an API server without DRA
			return nil
		}
		if err != nil {
			return fmt.Errorf("list slices: %w", err)
		}
		for i := range list.Items {
			if n := len(list.Items[i].Spec.Devices); n > 0 {
				return fmt.Errorf("ResourceSlice %s still offers %s", list.Items[i].Name, inventory.CountNoun(n, "device"))
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(u.settleTime):
		return nil
	}
}

// checkClaims returns an *inUse if a device of the driver is allocated to a claim.
func (u *uninstaller) checkClaims(ctx context.Context) error {
	var used inUse
	options := metav1.ListOptions{Limit: 500}
	for {
		list, err := draclient.New(u.client).ResourceClaims("").List(ctx, options)
		if apierrors.IsNotFound(err) { // an API server without DRA
			return nil
		}
		if err != nil {
			return fmt.Errorf("list claims: %w", err)
		}
		for i := range list.Items {
			if who := holder(&list.Items[i]); who != "" {
				used.users = append(used.users, who)
			}
		}
		if options.Continue = list.Continue; options.Continue == "" {
			break
		}
	}
	if used.users != nil {
		return &used
	}
	return nil
}

// holder describes the consumer of a claim with devices of the driver, "" if the claim has none.
func holder(claim *resourceapi.ResourceClaim) string {
	if claim.Status.Allocation == nil {
		return ""
	}
	var nodes, devices []string
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver == discovery.Domain {
			nodes, devices = append(nodes, discovery.NodeOfPool(result.Pool)), append(devices, result.Device)
		}
	}
	if devices == nil {
		return ""
	}
	by := "claim " + claim.Namespace + "/" + claim.Name
	var pods []string
	for _, consumer := range claim.Status.ReservedFor {
		if consumer.APIGroup == "" && consumer.Resource == "pods" {
			pods = append(pods, claim.Namespace+"/"+consumer.Name)
		}
	}
	if pods != nil {
		by = fmt.Sprintf("pod %s (%s)", strings.Join(pods, ", "), by)
	}
	return fmt.Sprintf("node %s: %s has %s", strings.Join(slices.Compact(nodes), ", "), by, strings.Join(devices, ", "))
}

// inUse is the error for devices in use, with their consumers.
type inUse struct{ users []string }

func (e *inUse) Error() string {
	return "devices are in use, so nothing was removed; delete these pods and claims first:\n  " + strings.Join(e.users, "\n  ")
}

func (u *uninstaller) printf(format string, args ...any) { fmt.Fprintf(u.out, format+"\n", args...) }
