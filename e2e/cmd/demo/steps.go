package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
	"chandler.dev/e2e/kubectl"
)

// recordedHost is a server with eight GPUs, two under each PCIe root.
const recordedHost = "discovery/families/amdgpu/testdata/mi210x8.host"

// kvmResource is the extended resource that the demo's configuration offers by the device plugin
// API.
const kvmResource = "devices.kubevirt.io/kvm"

// patience is the time limit of each step of the demo. After the limit the demo reports the unmet
// condition and ends.
const patience = time.Minute

type demo struct {
	project chandler.Project
	cluster *cluster.Cluster
	kubectl *kubectl.Client
	helm    chandler.Helm
}

// prepare installs Chandler on a simulated host and prints the devices that Chandler offers.
func (d *demo) prepare(ctx context.Context) error {
	heading("Laying out a recorded server with eight GPUs, beside this machine's own devices")
	if err := d.project.Simulate(ctx, d.cluster.Node, filepath.Join(d.project.Dir, recordedHost)); err != nil {
		return err
	}
	table, err := d.project.Discover(ctx, d.cluster.Node)
	if err != nil {
		return err
	}
	fmt.Printf("$ chandler discover --host-root %s\n%s", chandler.HostDir, table)

	heading("Installing Chandler by its Helm chart")
	if err := d.project.LoadImages(ctx, d.cluster.Node); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	notes, err := d.project.InstallChart(ctx, d.helm, d.kubectl)
	if err != nil {
		return err
	}
	fmt.Printf("$ helm install chandler deployments/helm/chandler --namespace chandler --create-namespace --values e2e/chandler/values.yaml\n%s", notes)
	return d.showOffers(ctx)
}

// showOffers waits until both APIs offer devices, and prints them.
func (d *demo) showOffers(ctx context.Context) error {
	var devices map[string]resourceapi.Device
	err := d.kubectl.Until(ctx, "the ResourceSlices of eight GPUs", func(ctx context.Context) (err error) {
		devices, err = chandler.Devices(ctx, d.kubectl)
		if gpus := len(devices); err == nil && gpus < 8 {
			err = fmt.Errorf("there are %d devices", gpus)
		}
		return err
	})
	if err != nil {
		return err
	}
	heading("Dynamic Resource Allocation offers: the ResourceSlices of the node")
	if err := d.printSlices(ctx); err != nil {
		return err
	}
	if !haveKVM() {
		return nil
	}
	heading("The device-plugin API offers: the node's allocatable resources")
	return d.kubectl.Until(ctx, "allocatable "+kvmResource, func(ctx context.Context) error {
		node, err := d.kubectl.CoreV1().Nodes().Get(ctx, d.cluster.NodeName(), metav1.GetOptions{})
		if err != nil {
			return err
		}
		count := node.Status.Allocatable[kvmResource]
		if count.IsZero() {
			return errors.New("it is zero")
		}
		fmt.Printf("%s: %d\n", kvmResource, count.Value())
		return nil
	})
}

func (d *demo) printSlices(ctx context.Context) error {
	list, err := d.kubectl.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, slice := range list.Items {
		fmt.Printf("ResourceSlice %s  driver %s  pool %s  generation %d\n", slice.Name, slice.Spec.Driver, slice.Spec.Pool.Name, slice.Spec.Pool.Generation)
		table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
		fmt.Fprintln(table, "  DEVICE\tVENDOR\tMODEL\tMEMORY\tPCIE ROOT\tNUMA")
		for _, device := range slice.Spec.Devices {
			memory := "-"
			if capacity, ok := device.Capacity["memory"]; ok {
				memory = capacity.Value.String()
			}
			fmt.Fprintf(table, "  %s\t%s\t%s\t%s\t%s\t%s\n", device.Name, value(device, "vendor"), value(device, "model"), memory,
				value(device, "resource.kubernetes.io/pcieRoot"), value(device, "resource.kubernetes.io/numaNode"))
		}
		if err := table.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// value returns an attribute of a device as text, or a dash if the device has no such attribute.
func value(device resourceapi.Device, name resourceapi.QualifiedName) string {
	switch attribute := device.Attributes[name]; {
	case attribute.StringValue != nil:
		return *attribute.StringValue
	case attribute.IntValue != nil:
		return fmt.Sprint(*attribute.IntValue)
	}
	return "-"
}

// pair runs a pod with two GPUs on one NUMA node.
func (d *demo) pair(ctx context.Context) error {
	heading("1. A pod that asks for two GPUs of one vendor on one NUMA node")
	return d.example(ctx, "gpu-pair.yaml", func(ctx context.Context) error {
		return d.show(ctx, "gpu-pair")
	})
}

// kvm runs a pod that requests /dev/kvm by the device plugin API.
func (d *demo) kvm(ctx context.Context) error {
	heading("2. A pod with limits: %s: 1, served by the device-plugin API", kvmResource)
	if !haveKVM() {
		fmt.Println("Left out: this machine has no /dev/kvm.")
		return nil
	}
	return d.example(ctx, "kvm-classic.yaml", func(ctx context.Context) error {
		return d.show(ctx, "kvm-classic")
	})
}

func haveKVM() bool {
	_, err := os.Stat("/dev/kvm")
	return err == nil
}

// turns runs two pods that request the same GPU.
func (d *demo) turns(ctx context.Context) error {
	heading("3. Two pods that ask for the same GPU")
	return d.example(ctx, "gpu-in-turns.yaml", func(ctx context.Context) error {
		running, waiting, err := d.oneRuns(ctx)
		if err != nil {
			return err
		}
		fmt.Printf("Pod %s runs. Pod %s waits: %s\n", running, waiting.Name, reason(waiting))
		deleted := time.Now()
		if err := d.kubectl.DeletePod(ctx, metav1.NamespaceDefault, running); err != nil {
			return err
		}
		if _, err := d.kubectl.WaitForPod(ctx, metav1.NamespaceDefault, waiting.Name, corev1.PodRunning); err != nil {
			return err
		}
		fmt.Printf("Pod %s was deleted. %.1f s later it has ended and pod %s runs.\n", running, time.Since(deleted).Seconds(), waiting.Name)
		return nil
	})
}

// oneRuns waits until one of the two pods runs and the scheduler has refused the other.
func (d *demo) oneRuns(ctx context.Context) (running string, waiting *corev1.Pod, err error) {
	err = d.kubectl.Until(ctx, "one of two pods to run", func(ctx context.Context) error {
		running, waiting = "", nil
		for _, name := range []string{"first", "second"} {
			pod, err := d.kubectl.CoreV1().Pods(metav1.NamespaceDefault).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			switch {
			case pod.Status.Phase == corev1.PodRunning && running != "":
				return kubectl.Final(errors.New("both run with the same GPU"))
			case pod.Status.Phase == corev1.PodRunning:
				running = name
			case reason(pod) != "":
				waiting = pod
			}
		}
		if running == "" || waiting == nil {
			return errors.New("neither runs, or the other has not been refused yet")
		}
		return nil
	})
	return running, waiting, err
}

// reason returns the scheduler's message for a pod that is not scheduled, and "" for any other pod.
func reason(pod *corev1.Pod) string {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
			return condition.Message
		}
	}
	return ""
}

// nothingLeft waits until the CDI specs and records of the pods are removed.
func (d *demo) nothingLeft(ctx context.Context) error {
	heading("4. The pods are gone, and with them their CDI specs and records")
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return d.kubectl.Until(ctx, "CDI specs and records to be gone", func(context.Context) error {
		held, err := chandler.Held(d.cluster.Node)
		if err != nil {
			return err
		}
		if len(held) > 0 {
			return fmt.Errorf("still there: %s", strings.Join(held, ", "))
		}
		fmt.Printf("%s: no CDI spec\n%s: no record\n", chandler.CDIDir, chandler.RecordDir)
		return nil
	})
}

// example applies an example of the project, calls work, and deletes the example.
func (d *demo) example(ctx context.Context, name string, work func(context.Context) error) error {
	file := d.project.Manifest(filepath.Join("examples", name))
	manifest, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	fmt.Printf("$ kubectl apply -f deployments/examples/%s\n", name)
	timed, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := d.kubectl.Apply(timed, string(manifest)); err != nil {
		return err
	}
	if err := work(timed); err != nil {
		return err
	}
	return d.kubectl.Delete(timed, string(manifest))
}

// show waits for a pod to succeed and prints its log.
func (d *demo) show(ctx context.Context, pod string) error {
	if _, err := d.kubectl.WaitForPod(ctx, metav1.NamespaceDefault, pod, corev1.PodSucceeded); err != nil {
		return err
	}
	logs, err := d.kubectl.Logs(ctx, metav1.NamespaceDefault, pod, "")
	if err != nil {
		return err
	}
	fmt.Printf("$ kubectl logs %s\n", pod)
	lines := strings.Split(strings.TrimSpace(logs), "\n")
	for _, line := range slices.DeleteFunc(lines, func(line string) bool { return line == "" }) {
		fmt.Println("  " + line)
	}
	return nil
}
