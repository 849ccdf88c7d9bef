package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

// A container reads from a file which GPU it was given, and all that the slices
// say of it; the file goes with the claim.
func TestMetadata(t *testing.T) {
	offers(t)
	apply(t, example(t, "gpu-metadata.yaml"))
	f := succeed(t, "gpu-metadata")
	name := f.variable("CHANDLER_DEVICES")
	var want []string
	for attribute, value := range offered(t)[name].Attributes {
		want = append(want, fmt.Sprintf("any %s %s=%s", name, attribute, textOf(value)))
	}
	slices.Sort(want)
	if got := f["metadata"]; len(want) == 0 || !slices.Equal(got, want) {
		t.Errorf("the container reads\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	remove(t, example(t, "gpu-metadata.yaml"))
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
