package ledger

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// Blocked is the error that explains why a device is not available to an owner.
type Blocked struct {
	Device string // the wanted device
	By     Owner  // the owner of the blocking entry, the zero Owner if unknown
	Has    string // the owner's device

	// Forgotten means that the kubelet allocates the device again while it lists the pod that has
	// the device without the device. The device becomes available once that pod is known to have
	// ended.
	Forgotten bool

	Passing  bool // the owner has ended or is ending, and the device is being reclaimed
	Changing bool // the agent is changing the device

	// Starting is the blocking grant if the grant is for another function of the same IOMMU group
	// and its container is not known yet, nil otherwise. The wanted device may be for the same
	// container.
	Starting *Grant

	late bool // a call of the agent on the device is overdue
	why  string
}

// Error names the device and its owner.
func (b *Blocked) Error() string { return fmt.Sprintf("device %s is in use by %s", b.Device, b.why) }

// Why describes the owner without the name of the device.
func (b *Blocked) Why() string { return b.why }

// mayOpen returns [*Blocked] if a process has one of the devices open and the device can be opened
// by only one process at a time. The caller has reserved the devices.
func (l *Ledger) mayOpen(holds []Hold, own []types.UID, s Stock) error {
	if l.config.Opened == nil {
		return nil
	}
	asked := make(map[string]bool)
	for _, h := range holds {
		d, found := s.Device(h.Device)
		if !found || asked[h.Device] || h.Open || h.Amount != nil {
			continue // the containers of other consumers may have a shared device open
		}
		asked[h.Device] = true
		if who := l.config.Opened(&d.Device, own); who != "" {
			return &Blocked{Device: h.Device, Has: h.Device, Passing: true, why: who}
		}
	}
	return nil
}

// index finds the accounts that may concern a device. Thousands of shares of one device are found
// under the same terms, so the accounts of a term are a map.
type index struct {
	of    map[string]map[string]*account // accounts by term (physical device, device, node or function) and by key
	own   map[string]bool                // terms whose accounts no copy of the index shares
	loose []*account                     // accounts without a known physical device, which are checked for every device
}

func newIndex() index {
	return index{of: make(map[string]map[string]*account), own: make(map[string]bool)}
}

// copy returns an index that does not change any more. The copy and the original share their maps
// until the original changes.
func (x *index) copy() index {
	clear(x.own)
	return index{of: maps.Clone(x.of), loose: x.loose}
}

// writable returns the accounts of a term as a map that no copy shares.
func (x *index) writable(term string) map[string]*account {
	if !x.own[term] {
		x.own[term] = true
		x.of[term] = maps.Clone(x.of[term])
	}
	if x.of[term] == nil {
		x.of[term] = make(map[string]*account)
	}
	return x.of[term]
}

// add enters an account.
func (x *index) add(a *account) {
	if a.loose() {
		x.loose = append(slices.Clone(x.loose), a)
		return
	}
	for _, term := range a.terms() {
		x.writable(term)[a.key] = a
	}
}

func (x *index) remove(a *account) {
	if a.loose() {
		x.loose = slices.DeleteFunc(slices.Clone(x.loose), func(other *account) bool { return other == a })
		return
	}
	for _, term := range a.terms() {
		accounts := x.writable(term)
		if accounts[a.key] == a {
			delete(accounts, a.key)
		}
		if len(accounts) == 0 {
			delete(x.of, term)
			delete(x.own, term)
		}
	}
}

// loose reports whether the physical device of an account is unknown, so that no term finds the
// account.
func (a *account) loose() bool {
	sealed, ok := a.entry.(*Sealed)
	return ok && sealed.all || slices.ContainsFunc(a.holds, func(h Hold) bool { return h.Present && h.Silicon == "" })
}

// terms returns the terms under which an account is found.
func (a *account) terms() []string {
	terms := make(map[string]bool)
	if e, ok := a.entry.(*lease); ok {
		for _, term := range e.terms() {
			terms[term] = true
		}
	}
	for i := range a.holds {
		h := &a.holds[i]
		terms[h.Device], terms[h.Silicon] = true, true
		for _, n := range h.Nodes {
			for _, term := range n.terms() {
				terms[term] = true
			}
		}
	}
	delete(terms, "")
	return slices.Sorted(maps.Keys(terms))
}

func (n *Node) numbered() bool { return n.Major != 0 || n.Minor != 0 }

// terms returns the terms under which the node is found: its path, and its numbers if known.
func (n *Node) terms() []string {
	if n.numbered() {
		return []string{n.Path, n.numbers()}
	}
	return []string{n.Path}
}

// String returns the path and the numbers of a node.
func (n Node) String() string {
	if !n.numbered() {
		return n.Path
	}
	return fmt.Sprintf("%s (%d:%d)", n.Path, n.Major, n.Minor)
}

func (n *Node) numbers() string { return fmt.Sprintf("%s %d:%d", n.Type, n.Major, n.Minor) }

// concerned returns the accounts that may block a hold, in a fixed order. Accounts are found by the
// recorded physical device, and by the present parts of the wanted physical device.
func (x *index) concerned(w *Hold, nodes []Node, q *question) []*account {
	terms := append([]string{w.Device, w.Silicon}, q.stock.Parts(w.Silicon)...)
	for i := range nodes {
		terms = append(terms, nodes[i].terms()...)
	}
	seen := make(map[*account]bool)
	found := slices.Clone(x.loose)
	for _, term := range terms {
		for _, a := range x.of[term] {
			if !seen[a] {
				seen[a] = true
				found = append(found, a)
			}
		}
	}
	found = slices.DeleteFunc(found, q.exempts)
	slices.SortFunc(found, func(a, b *account) int { return cmp.Compare(a.key, b.key) })
	return found
}

// question describes a query of the index: whether an owner may have the wanted devices.
type question struct {
	by    discovery.Mode
	owner Owner
	own   string         // key of the owner's entry, which does not block the owner
	of    discovery.Mode // consider only entries of this API, those of both APIs if ""
	with  *Grant         // a grant of the same container; see [Grant.With]
	had   Owner          // if set, the entry with key own is exempt only if it belongs to this owner
	lease *lease         // the lease that wants the devices; nil for a claim or a grant
	want  []Hold
	stock Stock

	ending bool // whether grants that are ending block too, by either API
}

// exempts reports whether an account does not block the query: the owner's own entries, and leases
// for changes on behalf of the owner. Two devices that only wait for their resets do not wait for
// each other. A device that is withheld after its consumer has ended is withheld from that consumer
// too, because the key may be that of an ID which another container gets next.
func (q *question) exempts(a *account) bool {
	e, leased := a.entry.(*lease)
	switch {
	case leased && (e == q.lease || e.idle && q.had != Owner{}):
		return true
	case q.own == "":
		return false
	case q.with != nil && a.entry == Entry(q.with):
		return true
	case a.key == q.own:
		return q.had == Owner{} || a.entry.Owner() == q.had
	}
	return a.key == sealedKey(q.own) || leased && e.Consumer == q.own && (q.lease != nil || e.why == "")
}

// blocked returns the first conflict of a query, nil if the owner may have the devices. All rules
// of exclusion are applied here.
func (x *index) blocked(q question) *Blocked {
	if b := x.blockedFunctions(&q); b != nil {
		return b
	}
	for i := range q.want {
		if b := x.blockedHold(q, i); b != nil {
			return b
		}
	}
	return nil
}

// blockedFunctions returns the lease that already covers one of the functions of the wanted lease.
func (x *index) blockedFunctions(q *question) *Blocked {
	if q.lease == nil {
		return nil
	}
	for _, function := range q.lease.Functions {
		for _, a := range x.of[functionTerm(function)] {
			if e, ok := a.entry.(*lease); ok && e.has(function) && !q.exempts(a) {
				return a.blocking(q.lease.subject(), q.lease.subject(), a.who(Owner{}))
			}
		}
	}
	return nil
}

func (x *index) blockedHold(q question, i int) *Blocked {
	w := complete(q.want[i], q.stock)
	if w.Open {
		return nil
	}
	nodes := NodesOf(w.Device, q.stock)
	balance := newBalance(&w, q.stock)
	for j := range q.want {
		if j != i {
			other := complete(q.want[j], q.stock)
			balance.add(&other) // the owner's other devices; a shortage shows when those of others are added
		}
	}
	for _, a := range x.concerned(&w, nodes, &q) {
		counts := a.blocks(q.by) || q.ending && a.state == Ending
		if !counts || q.of != "" && a.entry.API() != q.of {
			continue
		}
		who := a.who(q.owner)
		for _, h := range judged(a.holds, q.stock) {
			if h.Open {
				continue
			}
			why := ""
			switch {
			case q.apart(a) && h.touches(&w), h.excludes(&w):
				why = fmt.Sprintf("%s (device %s)", who, h.Device)
			case !h.touches(&w) && h.bears(nodes) && !a.explains(&w, q.stock):
				why = fmt.Sprintf("%s, which was given its nodes as those of device %s", who, h.Device)
			default:
				if short := balance.add(&h); short != "" {
					why = fmt.Sprintf("%s: with its device %s, %s", who, h.Device, short)
				}
			}
			if why != "" {
				b := a.blocking(w.Device, h.Device, why)
				if g, ok := a.entry.(*Grant); ok && g.Container == "" && h.Device != w.Device && sameGroup(&h, &w) {
					b.Starting = g
				}
				return b
			}
		}
		if sealed, ok := a.entry.(*Sealed); ok && sealed.all {
			return &Blocked{Device: w.Device, By: sealed.Owner(), why: sealed.who()}
		}
	}
	return nil
}

// sameGroup reports whether two devices are functions of one IOMMU group, which only one process
// can use.
func sameGroup(a, b *Hold) bool {
	_, one := a.Takes[discovery.GroupCounter]
	_, other := b.Takes[discovery.GroupCounter]
	return one && other && a.Silicon == b.Silicon
}

// apart reports whether an account belongs to the other API, which never has devices of the same
// physical device. Changes of the agent are judged by device, whatever API offers the device.
func (q *question) apart(a *account) bool {
	return q.lease == nil && !a.changes() && a.entry.API() != q.by
}

// judged returns the holds of an account as recorded, and a second time as they are at present if
// the device belongs to another physical device now. Functions become one physical device when
// passthrough is enabled for them, or when a function is plugged into their IOMMU group.
func judged(holds []Hold, stock Stock) []Hold {
	all := make([]Hold, 0, len(holds))
	for _, h := range holds {
		h = complete(h, stock)
		all = append(all, h)
		if device, found := present(h.Device, stock); found && device.Silicon() != h.Silicon {
			h.Silicon, h.Whole, h.Takes = device.Silicon(), device.PartOf == nil, device.Takes
			all = append(all, h)
		}
	}
	return all
}

// complete fills in, from the present snapshot, the fields of a hold that its entry does not
// record.
func complete(h Hold, stock Stock) Hold {
	if !h.Present {
		return h
	}
	device, found := present(h.Device, stock)
	switch {
	case found:
		h.Device, h.Silicon, h.Whole, h.Takes = device.Name, device.Silicon(), device.PartOf == nil, device.Takes
		h.Open = h.Open || device.Open
	case h.Silicon == "":
		h.Silicon, h.Whole = h.Device, true
	}
	return h
}

// present finds the device with a name from a CDI spec or a file. The name may be that of a
// numbered share of a device that is not shared by number any more.
func present(name string, stock Stock) (rules.Offered, bool) {
	device, found := stock.Device(name)
	if of, share := rules.ShareOf(name); !found && share {
		return stock.Device(of)
	}
	return device, found
}

// touches reports whether both holds are on one physical device.
func (h *Hold) touches(w *Hold) bool { return h.Silicon == w.Silicon || h.Device == w.Device }

// excludes reports whether hold h excludes the wanted hold, whatever other holds exist. Two parts
// of one physical device do not exclude each other, nor do two shares of one form: the balance
// decides whether there is enough for both.
func (h *Hold) excludes(w *Hold) bool {
	switch {
	case h.Device == w.Device:
		return h.Amount == nil || w.Amount == nil || !sameForm(h.Form, w.Form)
	case h.Silicon != w.Silicon:
		return false
	}
	return h.Whole || w.Whole || h.takesAll() || w.takesAll()
}

// sameForm reports whether shares of two forms are compatible. An entry of an older agent records
// only the beginning of the form, and is compatible with every form that begins so.
func sameForm(a, b string) bool {
	return a == b || strings.HasPrefix(a, b+" ") || strings.HasPrefix(b, a+" ")
}

// takesAll reports whether the hold is the whole of a device that has parts.
func (h *Hold) takesAll() bool { return h.Device == h.Silicon && len(h.Takes) > 0 }

// bears reports whether the hold includes one of the nodes.
func (h *Hold) bears(nodes []Node) bool {
	return slices.ContainsFunc(h.Nodes, func(mine Node) bool {
		return slices.ContainsFunc(nodes, func(n Node) bool {
			return mine.Path == n.Path || mine.numbered() && mine.numbers() == n.numbers()
		})
	})
}

// explains reports whether the nodes of a grant may be those of the wanted device, because the
// owner has that device too. A grant records the nodes of all its devices together.
func (a *account) explains(w *Hold, stock Stock) bool {
	return a.entry.API() == discovery.ModeDevicePlugin && slices.ContainsFunc(a.holds, func(h Hold) bool {
		h = complete(h, stock)
		return h.touches(w)
	})
}

// Renumbered describes how the present nodes of devices differ from the given ones, as after cards
// were removed and found again. It returns "" if they do not differ, or if one of the devices is
// missing.
func Renumbered(given []Node, devices []string, s Stock) string {
	var now, common []string
	var has []Node
	silicon := make(map[string]bool)
	for _, name := range devices {
		d, found := s.Device(name)
		if !found {
			return "" // a missing device is reported elsewhere
		}
		has, common, silicon[d.Silicon()] = append(has, NodesOf(name, s)...), append(common, d.CommonNodes...), true
	}
	for _, n := range has {
		now = append(now, n.String())
	}
	kept, other := false, ""
	for i := range given {
		n := &given[i]
		if slices.Contains(common, n.Path) {
			continue
		}
		changed := fmt.Sprintf("it was given as %s and is %s now", n, strings.Join(now, ", "))
		j := slices.IndexFunc(has, func(other Node) bool { return other.Path == n.Path })
		switch {
		case j < 0:
			if who := ownerOf(n.Path, s, silicon); who != "" {
				return fmt.Sprintf("%s; %s is device %s now", changed, n.Path, who)
			}
			other = changed
		case n.numbered() && has[j].numbered() && n.numbers() != has[j].numbers():
			return changed
		default:
			kept = true
		}
	}
	if kept || len(has) == 0 {
		return ""
	}
	return other
}

// ownerOf returns the device that has a node now, "" if there is none outside the excepted physical
// devices.
func ownerOf(path string, s Stock, except map[string]bool) string {
	for _, name := range s.Names() {
		d, _ := s.Device(name)
		if !d.Open && !except[d.Silicon()] && slices.ContainsFunc(NodesOf(name, s), func(n Node) bool { return n.Path == path }) {
			return name
		}
	}
	return ""
}

// NodesOf returns the present nodes of a device, without common nodes that other physical devices
// share.
func NodesOf(name string, stock Stock) (nodes []Node) {
	device, found := stock.Device(name)
	if !found {
		return nil
	}
	return NodesIn(device.OwnNodes())
}

// NodesIn returns the host's nodes that CDI edits describe.
func NodesIn(edits []*specs.DeviceNode) (nodes []Node) {
	for _, edit := range edits {
		n := Node{Path: cmp.Or(edit.HostPath, edit.Path), Type: edit.Type, Major: uint32(edit.Major), Minor: uint32(edit.Minor)}
		if n.Type == "u" {
			n.Type = "c" // "u" is an unbuffered character device, the same as "c"
		}
		nodes = append(nodes, n)
	}
	return nodes
}

// balance adds up the use of the counters of the wanted device's physical device, and of the
// device's capacity.
type balance struct {
	wanted   *Hold
	counters sums[string]
	capacity sums[resourceapi.QualifiedName]
	counted  map[string]bool // devices whose takes are in counters; all shares of a device together count once
}

// sums is the taken amount and the limit of each counter or capacity.
type sums[K ~string] struct {
	taken, limits map[K]resource.Quantity
}

func newBalance(wanted *Hold, stock Stock) *balance {
	b := &balance{
		wanted:   wanted,
		counters: newSums(wanted.Takes),
		capacity: newSums(wanted.Amount),
		counted:  map[string]bool{wanted.Device: true},
	}
	device, _ := stock.Device(wanted.Device)
	for counter := range wanted.Takes {
		b.counters.limits[counter] = resource.Quantity{}
		if device.PartOf != nil {
			b.counters.limits[counter] = device.PartOf.Counters[counter]
		}
	}
	for name, capacity := range device.Capacity {
		b.capacity.limits[name] = capacity.Value
	}
	if wanted.Shares > 0 {
		b.capacity.limits[discovery.Shares] = *resource.NewQuantity(wanted.Shares, resource.DecimalSI)
	}
	return b
}

func newSums[K ~string](taken map[K]resource.Quantity) sums[K] {
	return sums[K]{taken: maps.Clone(taken), limits: make(map[K]resource.Quantity)}
}

// add counts another hold and returns a description of the exceeded counter or capacity, "" if
// there is enough of each.
func (b *balance) add(other *Hold) string {
	if b.wanted.Open || other.Open || other.Silicon != b.wanted.Silicon {
		return ""
	}
	if other.Device == b.wanted.Device {
		if capacity := b.capacity.add(other.Amount); capacity != "" {
			return fmt.Sprintf("%s would have to give more of its %s than there is", b.wanted.Device, capacity)
		}
	}
	if b.counted[other.Device] {
		return ""
	}
	b.counted[other.Device] = true
	if counter := b.counters.add(other.Takes); counter != "" {
		return fmt.Sprintf("%s would have to give more of counter %s than there is", b.wanted.Silicon, counter)
	}
	return ""
}

// add adds amounts of another hold to the sums and returns the first exceeded name. A name may have
// no limit any more because the device has changed; then the scheduler alone has checked the
// amount.
func (s *sums[K]) add(takes map[K]resource.Quantity) K {
	for _, name := range slices.Sorted(maps.Keys(takes)) {
		total, counted := s.taken[name]
		if !counted {
			continue
		}
		total = total.DeepCopy()
		total.Add(takes[name])
		s.taken[name] = total
		if limit, limited := s.limits[name]; limited && total.Cmp(limit) > 0 {
			return name
		}
	}
	return ""
}
