package ledger

import (
	"encoding/json"
	"slices"
	"strings"
	"time"

	"chandler.dev/discovery"
)

// Grant is the entry of one classic ID that a container has or will get. At first a Grant has no
// container; the container is set when PodResources lists it. A Grant is never modified. One file
// holds all grants.
type Grant struct {
	Resource  string    `json:"resource"`
	ID        string    `json:"id"`
	Devices   []string  `json:"devices,omitempty"`   // of the ID
	Silicon   []string  `json:"silicon,omitempty"`   // those without unlimited sharing
	Exclusive bool      `json:"exclusive,omitempty"` // the devices had no other ID in the resource
	Since     time.Time `json:"since"`
	Container string    `json:"container,omitempty"` // "namespace/pod container", "" until PodResources lists it

	// HostFiles are stored whole: after a reboot the kubelet starts the pod again without another
	// Allocate, and the files must exist again.
	HostFiles []discovery.HostFile `json:"files,omitempty"`

	// Form is how the devices were divided into the shares that include the ID. Grants of earlier
	// versions have no Form: their shares belong to those of the same resource.
	Form string `json:"form,omitempty"`

	// Nodes are the nodes that the container was given. After a reboot the container is given the
	// nodes that have the same paths then.
	Nodes []Node `json:"nodes,omitempty"`

	// Until is the time until which containers that had the ID before may continue: the kubelet reuses
	// the IDs of a force-deleted pod at once.
	Until time.Time `json:"until,omitzero"`

	// Earlier are the containers that had the ID before, for as long as PodResources lists them. After
	// the loss of its checkpoint, a kubelet allocates IDs that these containers still have.
	Earlier []string `json:"earlier,omitempty"`

	// CDI reports that the container was given names of CDI devices. The CDI specs must exist whenever
	// the container starts again, also after a reboot.
	CDI bool `json:"cdi,omitempty"`

	// With is the grant of another function of the same IOMMU group that the container was given a
	// moment before. With does not block this grant. It is not stored: after both are allocated,
	// neither is requested again.
	With *Grant `json:"-"`

	missing time.Time // time when PodResources first left out the ID
	lost    bool      // the kubelet lists the container without the ID
	ended   bool      // lost, and the API server reports that the pod has ended
}

// Key implements [Entry].
func (g *Grant) Key() string { return GrantKey(g.Resource, g.ID) }

// GrantKey returns the key of the grant of an ID.
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

// encodeGrants returns the content of the file of grants.
func encodeGrants(grants []*Grant) ([]byte, error) {
	data, err := json.MarshalIndent(grants, "", "  ")
	return append(data, '\n'), err
}

// decodeGrants decodes the file of grants.
func decodeGrants(data []byte) ([]*Grant, error) {
	var saved []*Grant
	if err := json.Unmarshal(data, &saved); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(saved, func(g *Grant) bool { return g == nil }), nil
}
