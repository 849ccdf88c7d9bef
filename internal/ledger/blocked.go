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

// Blocked says why a device is not to be had. It is an error.
type Blocked struct {
	Device string // that is wanted
	By     Owner  // whose entry it is, none if that is not known
	Has    string // the device that the owner has

	// Forgotten says that the kubelet hands the device out again while the pod that has
	// it is listed without it. Once that pod is known to have ended, the device is to be had.
	Forgotten bool

	Passing  bool // the owner has ended, or is ending, and the device is being handed over
	Changing bool // the agent is changing the device

	// Starting is the grant of another function of the same IOMMU group whose container is not known yet, nil if it is not
	// that which blocks the device. The device may be for the same container.
	Starting *Grant

	late bool // a call of the agent on the device is overdue
	why  string
}

// Error says who has the device.
func (b *Blocked) Error() string { return fmt.Sprintf("device %s is held by %s", b.Device, b.why) }

// Why says who has the device, without its name.
func (b *Blocked) Why() string { return b.why }

// mayOpen returns [*Blocked] if a process has a device open that only one process can open. The caller has reserved the
// devices.
func (l *Ledger) mayOpen(holds []Hold, own []types.UID, s Stock) error {
	if l.config.Opened == nil {
		return nil
	}
	asked := make(map[string]bool)
	for _, h := range holds {
		d, found := s.Device(h.Device)
		if !found || asked[h.Device] || h.Open || h.Amount != nil {
			continue // that of a shared device is open in the containers of its other consumers
		}
		asked[h.Device] = true
		if who := l.config.Opened(&d.Device, own); who != "" {
			return &Blocked{Device: h.Device, Has: h.Device, Passing: true, why: who}
		}
	}
	return nil
}

// index finds the accounts that may concern a device. Thousands of shares of one
// device are found under the same terms, so the accounts of a term are a map.
type index struct {
	of    map[string]map[string]*account // by what it is found under: silicon, devices, paths of nodes; by key
	own   map[string]bool                // terms whose accounts no copy of the index shares
	loose []*account                     // to be asked about everything: what they have is for the present to say
}

func newIndex() index {
	return index{of: make(map[string]map[string]*account), own: make(map[string]bool)}
}

// copy returns an index that stays as it is. The two share what is in them until it
// changes.
func (x *index) copy() index {
	clear(x.own)
	return index{of: maps.Clone(x.of), loose: x.loose}
}

// writable returns the accounts of a term, which no copy shares.
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

// loose reports whether it cannot be said under what silicon the account is to
// be found.
func (a *account) loose() bool {
	sealed, ok := a.entry.(*Sealed)
	return ok && sealed.all || slices.ContainsFunc(a.holds, func(h Hold) bool { return h.Present && h.Silicon == "" })
}

// terms are what an account is found under.
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

// terms are what the node is known by: its path, and its numbers if it has any.
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

// concerned returns the accounts that may block a hold, in a fixed order. Accounts are found by the silicon that they
// recorded, and by the devices that are parts of the wanted silicon now.
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

// question is one that is asked of the index: may an owner have this?
type question struct {
	by    discovery.Mode
	owner Owner
	own   string         // the key of the owner's entry, which keeps it from nothing
	of    discovery.Mode // whose entries count, those of both APIs if ""
	with  *Grant         // of the same container; see [Grant.With]
	had   Owner          // if set, the entry of the key own is exempt only if it is this owner's
	lease *lease         // what is wanted is for this lease; nil for a claim or a grant
	want  []Hold
	stock Stock

	ending bool // grants that are ending count, by either API
}

// exempts reports whether an account blocks nothing of what is asked: the owner's own entries, and leases on what
// changes for the owner. Two devices that only wait for their resets do not wait for each other. A device that is
// withheld after its consumer has ended is withheld from that consumer too: the key may be that of an ID which another
// container gets next.
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

// blocked is all that says who excludes whom.
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

// blockedFunctions returns which lease has one of the functions that are wanted for another.
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
			balance.add(&other) // what the owner gets besides; with what others have it is told
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

// sameGroup reports whether two devices are functions of one IOMMU group, which go to one process together.
func sameGroup(a, b *Hold) bool {
	_, one := a.Takes[discovery.GroupCounter]
	_, other := b.Takes[discovery.GroupCounter]
	return one && other && a.Silicon == b.Silicon
}

// apart reports whether an account is of the other API, which never has devices of the same silicon. What the agent
// changes is a matter of devices, whatever API offers them.
func (q *question) apart(a *account) bool {
	return q.lease == nil && !a.changes() && a.entry.API() != q.by
}

// judged returns what an account has, once as it was recorded and, where the device is part of other silicon
// now, once more as it is at present: functions become one piece of silicon when passthrough is enabled for them, or
// when a function is plugged into an IOMMU group.
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

// complete fills in what the present snapshot says of a hold whose entry does
// not say it.
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

// present finds the device of a name that a CDI spec or a file says. It may be that
// of a numbered share of a device which is not shared by number any more.
func present(name string, stock Stock) (rules.Offered, bool) {
	device, found := stock.Device(name)
	if of, share := rules.ShareOf(name); !found && share {
		return stock.Device(of)
	}
	return device, found
}

// touches reports whether both are of one piece of silicon.
func (h *Hold) touches(w *Hold) bool { return h.Silicon == w.Silicon || h.Device == w.Device }

// excludes reports whether who has h keeps others from having what is wanted,
// whatever else there is. Of two parts of one piece of silicon that is not so,
// nor of two shares of one form: what they take together is for the balance.
func (h *Hold) excludes(w *Hold) bool {
	switch {
	case h.Device == w.Device:
		return h.Amount == nil || w.Amount == nil || !sameForm(h.Form, w.Form)
	case h.Silicon != w.Silicon:
		return false
	}
	return h.Whole || w.Whole || h.takesAll() || w.takesAll()
}

// sameForm reports whether shares of two forms go together. An entry of an agent
// that wrote down less of its form goes with all that begin so.
func sameForm(a, b string) bool {
	return a == b || strings.HasPrefix(a, b+" ") || strings.HasPrefix(b, a+" ")
}

// takesAll reports whether a device that has parts is all of them.
func (h *Hold) takesAll() bool { return h.Device == h.Silicon && len(h.Takes) > 0 }

// bears reports whether an owner was given one of the nodes.
func (h *Hold) bears(nodes []Node) bool {
	return slices.ContainsFunc(h.Nodes, func(mine Node) bool {
		return slices.ContainsFunc(nodes, func(n Node) bool {
			return mine.Path == n.Path || mine.numbered() && mine.numbers() == n.numbers()
		})
	})
}

// explains reports whether the nodes of a grant may be those of what is wanted because
// its owner has that too: a grant says of all its devices together which nodes were
// given.
func (a *account) explains(w *Hold, stock Stock) bool {
	return a.entry.API() == discovery.ModeDevicePlugin && slices.ContainsFunc(a.holds, func(h Hold) bool {
		h = complete(h, stock)
		return h.touches(w)
	})
}

// Renumbered says how devices have other nodes than the ones that were given, as
// after cards were removed and found again; "" if they have the same.
func Renumbered(given []Node, devices []string, s Stock) string {
	var now, common []string
	var has []Node
	silicon := make(map[string]bool)
	for _, name := range devices {
		d, found := s.Device(name)
		if !found {
			return "" // there is more to say than that
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

// ownerOf returns the device that has a node now, "" if only some silicon has.
func ownerOf(path string, s Stock, except map[string]bool) string {
	for _, name := range s.Names() {
		d, _ := s.Device(name)
		if !d.Open && !except[d.Silicon()] && slices.ContainsFunc(NodesOf(name, s), func(n Node) bool { return n.Path == path }) {
			return name
		}
	}
	return ""
}

// NodesOf returns the nodes that a device and no other silicon has now.
func NodesOf(name string, stock Stock) (nodes []Node) {
	device, found := stock.Device(name)
	if !found {
		return nil
	}
	return NodesIn(device.OwnNodes())
}

// NodesIn returns the nodes of the host that edits are about.
func NodesIn(edits []*specs.DeviceNode) (nodes []Node) {
	for _, edit := range edits {
		n := Node{Path: cmp.Or(edit.HostPath, edit.Path), Type: edit.Type, Major: uint32(edit.Major), Minor: uint32(edit.Minor)}
		if n.Type == "u" {
			n.Type = "c" // the same, unbuffered
		}
		nodes = append(nodes, n)
	}
	return nodes
}

// balance adds up what is taken of what an owner wants to take of: the counters
// of its silicon, and the capacity of its device.
type balance struct {
	wanted   *Hold
	counters sums[string]
	capacity sums[resourceapi.QualifiedName]
	counted  map[string]bool // devices whose takes are in counters: all shares of one take together what it takes
}

// sums is what is taken of each of some things of which there is so much.
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

// add counts what another hold takes and returns, in words, of what there is
// then not enough, "" if there is enough of all.
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

// add counts what another takes of what is summed up, and returns the name of
// which there is then not enough. A name may have no limit any more, because the
// device has changed; the scheduler was the last to know it.
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
