package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/chandler"
)

// TestMetadata reads the metadata file in a container. The file must contain the name of the GPU
// and its attributes, published or not, and must be removed with the claim.
func TestMetadata(t *testing.T) {
	offers(t)
	apply(t, example(t, "gpu-metadata.yaml"))
	f := succeed(t, "gpu-metadata")
	name := f.variable("CHANDLER_DEVICES")
	want := []string{fmt.Sprintf("any %s serial=692231000417", name)} // not published by default
	for attribute, value := range offered(t)[name].Attributes {
		want = append(want, fmt.Sprintf("any %s %s=%s", name, attribute, textOf(value)))
	}
	got := f["metadata"]
	for _, line := range want {
		if !slices.Contains(got, line) {
			t.Errorf("the container reads\n%s\nwithout %s", strings.Join(got, "\n"), line)
		}
	}
	remove(t, example(t, "gpu-metadata.yaml"))
	nothingHeld(t)
}

// TestClaimStatus expects the status of a claim to report the prepared device as ready.
func TestClaimStatus(t *testing.T) {
	offers(t)
	const address, name = "0000:24:00.0", "pci-0000-24-00-0"
	apply(t, gpuPod("with-status", address))
	running(t, "with-status")
	until(t, "the claim's status to say that the GPU is ready", func(ctx context.Context) error {
		claim, err := kube.ResourceV1().ResourceClaims(metav1.NamespaceDefault).Get(ctx, "with-status", metav1.GetOptions{})
		if err != nil {
			return err
		}
		devices := claim.Status.Devices
		if len(devices) != 1 || devices[0].Driver != chandler.Driver || devices[0].Device != name || !meta.IsStatusConditionTrue(devices[0].Conditions, "Ready") {
			return fmt.Errorf("it says %+v", devices)
		}
		return nil
	})
	remove(t, gpuPod("with-status", address))
	nothingHeld(t)
}

func textOf(value resourceapi.DeviceAttribute) string {
	switch {
	case value.StringValue != nil:
		return *value.StringValue
	case value.VersionValue != nil:
		return *value.VersionValue
	case value.IntValue != nil:
		return fmt.Sprint(*value.IntValue)
	case value.BoolValue != nil:
		return fmt.Sprint(*value.BoolValue)
	}
	return "?"
}
