package discovery

import "strconv"

// Dialect is a device plugin's format of the IDs of shares: "GPU-1::3" is a share of "GPU-1".
type Dialect struct {
	// Infix stands between the ID of the device and the number of the share.
	Infix string `json:"shareInfix,omitempty"`

	// Stem replaces the device's ID and Infix if the ID of an unshared device ends in a number of its
	// own. For example, a GPU has the ID "card1-0" alone, and "card1-0", "card1-1", … with sharing:
	// its Stem is "card1-". The number of shares of a Shareable device with a Stem can be changed.
	Stem string `json:"shareStem,omitempty"`
}

// The dialects of plugins with sharing for any family. Chandler writes Replicas and Units.
var (
	Replicas = Dialect{Infix: "::"}  // the NVIDIA device plugin: copies of a device
	Units    = Dialect{Infix: "-_-"} // Aliyun GPU sharing: units of memory
	vGPUs    = Dialect{Infix: "-"}   // HAMi
)

// Dialects returns the possible dialects for the shares of any device.
func Dialects() []Dialect { return []Dialect{Replicas, Units, vGPUs} }

// Before returns the text before the number of a share. id is the ID of the unshared device.
func (d Dialect) Before(id string) string {
	if d.Stem != "" {
		return d.Stem
	}
	return id + d.Infix
}

// Share is a container's part of a unit-shared device.
type Share struct {
	Place     int // index of the device in the resource
	Container int // units of the container
	Call      int // units of all containers of the call
	Device    int // units of the device
}

// Variables returns the environment variables of Aliyun GPU sharing for a container. For
// aliyun.com/gpu-mem they are ALIYUN_COM_GPU_MEM_IDX, _POD, _CONTAINER and _DEV.
func (s Share) Variables(resource string) []string {
	prefix := VariableName(resource) + "_"
	return []string{
		prefix + "IDX=" + strconv.Itoa(s.Place),
		prefix + "POD=" + strconv.Itoa(s.Call),
		prefix + "CONTAINER=" + strconv.Itoa(s.Container),
		prefix + "DEV=" + strconv.Itoa(s.Device),
	}
}
