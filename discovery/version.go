package discovery

import (
	"fmt"
	"regexp"
	"strconv"

	resourceapi "k8s.io/api/resource/v1"
)

// versionNumbers matches "6.8.5", "550.120" and "535.104.05" of NVIDIA.
var versionNumbers = regexp.MustCompile(`^([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?$`)

// SetVersion sets a version attribute, which must be a semantic version. It converts two or three
// numbers: leading zeros are removed, and a missing third number becomes 0. The order and values of
// the numbers stay. Any other text is left out, because a semantic version cannot express it.
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
	a[name] = Attribute{VersionValue: &version}
}
