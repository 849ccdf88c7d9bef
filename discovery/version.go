package discovery

import (
	"fmt"
	"regexp"
	"strconv"

	resourceapi "k8s.io/api/resource/v1"
)

// versionNumbers matches "6.8.5", "550.120" and NVIDIA's "535.104.05".
var versionNumbers = regexp.MustCompile(`^([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?$`)

// SetVersion sets a version attribute, which in Kubernetes is a semantic
// version. Two or three numbers become one, without leading zeros and with a
// third number of zero where there is none: their order and values stay. A
// text that says more than that is left out, since it cannot be said.
func (a Attributes) SetVersion(name resourceapi.QualifiedName, text string) {
	m := versionNumbers.FindStringSubmatch(text)
	if m == nil {
		return
	}
	var numbers [3]uint64
	for i, digits := range m[1:] {
		numbers[i], _ = strconv.ParseUint(digits, 10, 64) // "" is 0
	}
	version := fmt.Sprintf("%d.%d.%d", numbers[0], numbers[1], numbers[2])
	a[name] = resourceapi.DeviceAttribute{VersionValue: &version}
}
