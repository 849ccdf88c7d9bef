package discovery

import "strconv"

// Dialect is how a plugin writes the IDs of shares: "GPU-1::3" is one of "GPU-1".
type Dialect struct {
	// Infix stands between the ID of the device and the number of the share.
	Infix string `json:"shareInfix,omitempty"`

	// Stem stands before the number if the ID of the device is numbered itself:
	// "card1-" of a GPU that has the ID "card1-0" alone and is "card1-0", "card1-1",
	// … shared. An Open device that has one may be given another count.
	Stem string `json:"shareStem,omitempty"`
}

// The dialects of plugins that share devices of any family. Chandler writes the
// first two.
var (
	Replicas = Dialect{Infix: "::"}  // NVIDIA's device plugin: copies of a device
	Units    = Dialect{Infix: "-_-"} // Aliyun's GPU sharing: units of memory
	vGPUs    = Dialect{Infix: "-"}   // HAMi
)

// Dialects returns those in which a share of any device may have been written.
func Dialects() []Dialect { return []Dialect{Replicas, Units, vGPUs} }

// Before returns what stands before the number of a share of a device that has the
// ID alone.
func (d Dialect) Before(id string) string {
	if d.Stem != "" {
		return d.Stem
	}
	return id + d.Infix
}

// Share is how much a container has of a device that is shared in units.
type Share struct {
	Place     int // of the device among those of the resource
	Container int // units of this container
	Call      int // units of all containers of the call
	Device    int // units of the device
}

// Variables returns what Aliyun's GPU sharing tells a container of its share: of
// aliyun.com/gpu-mem in ALIYUN_COM_GPU_MEM_IDX, _POD, _CONTAINER and _DEV.
func (s Share) Variables(resource string) []string {
	prefix := Variable(resource) + "_"
	return []string{
		prefix + "IDX=" + strconv.Itoa(s.Place),
		prefix + "POD=" + strconv.Itoa(s.Call),
		prefix + "CONTAINER=" + strconv.Itoa(s.Container),
		prefix + "DEV=" + strconv.Itoa(s.Device),
	}
}
