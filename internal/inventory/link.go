package inventory

import (
	"cmp"
	"slices"
	"strings"
)

// Fabric is a set of physical devices with private links.
type Fabric struct {
	Name     string      `json:"name"`             // the technology: NVLink, XGMI
	Fabric   string      `json:"fabric,omitempty"` // the attribute, or ""
	Members  []string    `json:"members"`          // physical devices, in the order of the tree
	Complete bool        `json:"complete"`         // all members are linked to each other, or the links are unknown
	Links    [][2]string `json:"links,omitempty"`  // each pair once
}

// linkNames are the names of link technologies, by the first word of a fabric's attribute.
var linkNames = map[string]string{"xgmi": "XGMI", "nvlink": "NVLink", "board": "board"}

// link finds the private links.
func (t *Tree) link(of map[string]*Device) {
	all := t.Silicon()
	byDevice := make(map[string]*Silicon)
	for _, s := range all {
		byDevice[s.Name] = s
		for _, name := range s.All() {
			byDevice[name] = s
		}
	}
	fabricOf := func(s *Silicon) string {
		for _, name := range s.All() {
			if fabric := of[name].Offered.Attributes.String("fabric"); fabric != "" {
				return fabric
			}
		}
		return ""
	}
	linked := func(s *Silicon) (others []*Silicon) {
		for _, name := range s.All() {
			for _, to := range of[name].Offered.Names("linkedTo") {
				if other := byDevice[to]; other != nil && other != s && !slices.Contains(others, other) {
					others = append(others, other)
				}
			}
		}
		return others
	}
	seen := make(map[*Silicon]bool)
	var reach func(s *Silicon, fabric string) []*Silicon
	reach = func(s *Silicon, fabric string) (members []*Silicon) {
		if seen[s] {
			return nil
		}
		seen[s] = true
		members = append(members, s)
		for _, other := range all {
			if fabric != "" && fabricOf(other) == fabric {
				members = append(members, reach(other, fabric)...)
			}
		}
		for _, other := range linked(s) {
			members = append(members, reach(other, fabric)...)
		}
		return members
	}
	for _, s := range all {
		fabric := fabricOf(s)
		if seen[s] || fabric == "" && len(linked(s)) == 0 {
			continue
		}
		members := reach(s, fabric)
		if len(members) < 2 {
			continue
		}
		slices.SortFunc(members, func(a, b *Silicon) int { return cmp.Compare(slices.Index(all, a), slices.Index(all, b)) })
		t.Fabrics = append(t.Fabrics, fabricWith(fabric, members, linked))
		for _, m := range members {
			m.Fabric = len(t.Fabrics)
		}
	}
}

// fabricWith returns a fabric with its links.
func fabricWith(fabric string, members []*Silicon, linked func(*Silicon) []*Silicon) Fabric {
	word, _, _ := strings.Cut(fabric, "-")
	f := Fabric{Name: linkNames[word], Fabric: fabric}
	if f.Name == "" {
		f.Name = "private links"
	}
	for i, s := range members {
		f.Members = append(f.Members, s.Name)
		for j, other := range members {
			if j > i && (slices.Contains(linked(s), other) || slices.Contains(linked(other), s)) {
				f.Links = append(f.Links, [2]string{s.Name, other.Name})
			}
		}
	}
	f.Complete = len(f.Links) == 0 || len(f.Links) == len(members)*(len(members)-1)/2
	return f
}
