package ledger

import (
	"encoding/json"
	"slices"
	"strings"
	"time"

	"chandler.dev/discovery"
)

// Grant is the entry of one classic ID that a container has, or is about to
// have. It begins without a container, and gets one once PodResources names it.
// It is never modified. A file holds all grants.
type Grant struct {
	Resource  string    `json:"resource"`
	ID        string    `json:"id"`
	Devices   []string  `json:"devices,omitempty"`   // that the ID stood for
	Silicon   []string  `json:"silicon,omitempty"`   // of those that are not open
	Exclusive bool      `json:"exclusive,omitempty"` // the devices had no other ID in the resource
	Since     time.Time `json:"since"`
	Container string    `json:"container,omitempty"` // "namespace/pod container", "" until PodResources says

	// HostFiles are written down whole: after a reboot the kubelet starts the
	// pod again without another Allocate, and they must be there again.
	HostFiles []discovery.HostFile `json:"files,omitempty"`

	// Form is how the devices were cut into the shares of which the ID is one.
	// Grants of agents before have none: their shares go with those of the same
	// resource.
	Form string `json:"form,omitempty"`

	// Nodes are those that the container was given. After a reboot it is given
	// what bears their paths then.
	Nodes []Node `json:"nodes,omitempty"`

	// Until is how long containers may go on that had the ID before, since the
	// kubelet hands out at once what a pod had that was deleted by force.
	Until time.Time `json:"until,omitzero"`

	// Earlier are the containers that had the ID before, as long as PodResources lists
	// them. A kubelet whose checkpoint was lost hands out what they still have.
	Earlier []string `json:"earlier,omitempty"`

	// CDI says that the container was given names of CDI devices. They must be there
	// whenever it starts again, after a reboot too.
	CDI bool `json:"cdi,omitempty"`

	// With is the grant of another function of the same IOMMU group that the container was given a moment before. It does not
	// block this one. It is not written down: once both are given, neither is asked for.
	With *Grant `json:"-"`

	missing time.Time // when PodResources first left it out again
	lost    bool      // the kubelet lists the container and does not know the ID
	ended   bool      // and the pod has ended, by the API server's word
}

// Key implements [Entry].
func (g *Grant) Key() string { return GrantKey(g.Resource, g.ID) }

// GrantKey is the key of the grant of an ID.
func GrantKey(resource, id string) string { return resource + " " + id }

// API implements [Entry].
func (g *Grant) API() discovery.Mode { return discovery.ModeDevicePlugin }

// Owner implements [Entry].
func (g *Grant) Owner() Owner {
	pod, container, _ := strings.Cut(g.Container, " ")
	namespace, name, _ := strings.Cut(pod, "/")
	return Owner{API: discovery.ModeDevicePlugin, Namespace: namespace, Name: name, Container: container}
}

// Holds implements [Entry].
func (g *Grant) Holds() []Hold {
	holds := make([]Hold, 0, len(g.Devices))
	for _, name := range g.Devices {
		h := Hold{Device: name, Present: true}
		switch {
		case slices.Contains(g.Silicon, name):
			h.Silicon, h.Whole = name, true
		case len(g.Silicon) == 1:
			h.Silicon = g.Silicon[0]
		case len(g.Silicon) == 0:
			h.Open = true
		}
		if !g.Exclusive {
			h.Amount, h.Form = Amounts{}, strings.TrimSpace(g.Resource+" "+g.Form)
		}
		holds = append(holds, h)
	}
	if len(holds) > 0 {
		holds[0].Nodes = g.Nodes
	}
	return holds
}

// Files implements [Entry].
func (g *Grant) Files() []discovery.HostFile { return g.HostFiles }

// encodeGrants returns the bytes of the file of grants.
func encodeGrants(grants []*Grant) ([]byte, error) {
	data, err := json.MarshalIndent(grants, "", "  ")
	return append(data, '\n'), err
}

// decodeGrants reads the file of grants.
func decodeGrants(data []byte) ([]*Grant, error) {
	var saved []*Grant
	if err := json.Unmarshal(data, &saved); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(saved, func(g *Grant) bool { return g == nil }), nil
}
