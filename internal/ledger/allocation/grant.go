package allocation

import (
	"encoding/json"
	"slices"
	"strings"
	"time"

	"chandler.dev/discovery"
)

// Grant is the entry of a device plugin ID of a present or future container. At first a Grant has
// no container; the agent sets the container when PodResources lists the ID. A Grant is never
// modified. A single file holds all grants.
type Grant struct {
	Resource  string    `json:"resource"`
	ID        string    `json:"id"`
	Devices   []string  `json:"devices,omitempty"`   // of the ID
	Silicon   []string  `json:"silicon,omitempty"`   // except devices with unlimited sharing
	Exclusive bool      `json:"exclusive,omitempty"` // the devices had no other ID in the resource
	Since     time.Time `json:"since"`
	Container string    `json:"container,omitempty"` // "namespace/pod container", "" until PodResources lists the ID

	// HostFiles are stored whole: after a reboot the kubelet starts the pod again without another
	// Allocate, and the files must exist again.
	HostFiles []discovery.HostFile `json:"files,omitempty"`

	// Form describes the division of the devices into shares. Grants of earlier versions have no
	// Form: their shares count as shares of the same resource.
	Form string `json:"form,omitempty"`

	// Nodes are the nodes that the container was given. After a reboot the container is given the
	// nodes with the same paths.
	Nodes []Node `json:"nodes,omitempty"`

	// Until is the end of the grace period of earlier containers with the ID: the kubelet reuses the
	// IDs of a force-deleted pod at once.
	Until time.Time `json:"until,omitzero"`

	// Earlier are the previous containers of the ID, for as long as PodResources lists them. After
	// the loss of its checkpoint, a kubelet allocates IDs of running containers again.
	Earlier []string `json:"earlier,omitempty"`

	// CDI is set if the container was given names of CDI devices. The CDI specs must exist whenever
	// the container starts again, also after a reboot.
	CDI bool `json:"cdi,omitempty"`

	// With is the grant of another function of the same IOMMU group given to the container a moment
	// before. With does not block the grant, and is not stored: after both are allocated, neither is
	// requested again.
	With *Grant `json:"-"`

	// The following fields are observations of the present agent, which the file omits.
	MissingSince time.Time `json:"-"` // time when PodResources first left out the ID
	IsLost       bool      `json:"-"` // the kubelet lists the container without the ID
	PodEnded     bool      `json:"-"` // lost, and the pod has ended according to the API server
}

// Key implements [Entry].
func (g *Grant) Key() string { return GrantKey(g.Resource, g.ID) }

// GrantKey returns the key of the grant of an ID.
func GrantKey(resource, id string) string { return resource + " " + id }

// GrantResource returns the resource in a key from [GrantKey].
func GrantResource(key string) string {
	resource, _, _ := strings.Cut(key, " ")
	return resource
}

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

// EncodeGrants returns the content of the file of grants.
func EncodeGrants(grants []*Grant) ([]byte, error) {
	data, err := json.MarshalIndent(grants, "", "  ")
	return append(data, '\n'), err
}

// DecodeGrants decodes the file of grants.
func DecodeGrants(data []byte) ([]*Grant, error) {
	var saved []*Grant
	if err := json.Unmarshal(data, &saved); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(saved, func(g *Grant) bool { return g == nil }), nil
}
