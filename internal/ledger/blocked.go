package ledger

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// Blocked is the error that explains why a device is not available to an owner.
type Blocked struct {
	Device      string // the wanted device
	Owner       Owner  // the owner of the blocking entry, the zero Owner if unknown
	OwnedDevice string // the owner's device

	// ForgottenByKubelet means that the kubelet allocates the device again while it lists the pod that
	// has the device without the device. The device becomes available once that pod is known to have
	// ended.
	ForgottenByKubelet bool

	Reclaiming bool // the owner has ended or is ending, and the device is being reclaimed
	Changing   bool // the agent is changing the device

	// Starting is the blocking grant if the grant is for another function of the same IOMMU group
	// and its container is not known yet, nil otherwise. The wanted device may be for the same
	// container.
	Starting *Grant

	overdue   bool // a call of the agent on the device is overdue
	ownerText string
}

// Error names the device and its owner.
func (b *Blocked) Error() string {
	return fmt.Sprintf("device %s is in use by %s", b.Device, b.ownerText)
}

// OwnerText describes the owner without the name of the device.
func (b *Blocked) OwnerText() string { return b.ownerText }

// index finds the accounts that may concern a device. Thousands of shares of one device are found
// under the same terms, so the accounts of a term are a map.
type index struct {
	byTerm      map[string]map[string]*account // accounts by term (physical device, device, node or function) and by key
	ownTerms    map[string]bool                // terms whose accounts no copy of the index shares
	withoutTerm []*account                     // accounts without a known physical device, which are checked for every device
}

func newIndex() index {
	return index{byTerm: make(map[string]map[string]*account), ownTerms: make(map[string]bool)}
}

// copy returns an index that does not change any more. The copy and the original share their maps
// until the original changes.
func (x *index) copy() index {
	clear(x.ownTerms)
	return index{byTerm: maps.Clone(x.byTerm), withoutTerm: x.withoutTerm}
}

// writableTerm returns the accounts of a term as a map that no copy shares.
func (x *index) writableTerm(term string) map[string]*account {
	if !x.ownTerms[term] {
		x.ownTerms[term] = true
		x.byTerm[term] = maps.Clone(x.byTerm[term])
	}
	if x.byTerm[term] == nil {
		x.byTerm[term] = make(map[string]*account)
	}
	return x.byTerm[term]
}

// add enters an account.
func (x *index) add(a *account) {
	if a.lacksSilicon() {
		x.withoutTerm = append(slices.Clone(x.withoutTerm), a)
		return
	}
	for _, term := range a.terms() {
		x.writableTerm(term)[a.key] = a
	}
}

func (x *index) remove(a *account) {
	if a.lacksSilicon() {
		x.withoutTerm = slices.DeleteFunc(slices.Clone(x.withoutTerm), func(other *account) bool { return other == a })
		return
	}
	for _, term := range a.terms() {
		accounts := x.writableTerm(term)
		if accounts[a.key] == a {
			delete(accounts, a.key)
		}
		if len(accounts) == 0 {
			delete(x.byTerm, term)
			delete(x.ownTerms, term)
		}
	}
}

// lacksSilicon reports whether the physical device of an account is unknown, so that no term finds
// the account.
func (a *account) lacksSilicon() bool {
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

func (n *Node) hasNumbers() bool { return n.Major != 0 || n.Minor != 0 }

// terms returns the terms under which the node is found: its path, and its numbers if known.
func (n *Node) terms() []string {
	if n.hasNumbers() {
		return []string{n.Path, n.numberText()}
	}
	return []string{n.Path}
}

// String returns the path and the numbers of a node.
func (n Node) String() string {
	if !n.hasNumbers() {
		return n.Path
	}
	return fmt.Sprintf("%s (%d:%d)", n.Path, n.Major, n.Minor)
}

func (n *Node) numberText() string { return fmt.Sprintf("%s %d:%d", n.Type, n.Major, n.Minor) }

// candidateAccounts returns the accounts that may block a hold, in a fixed order. Accounts are
// found by the recorded physical device, and by the present parts of the wanted physical device.
func (x *index) candidateAccounts(w *Hold, nodes []Node, q *query) []*account {
	terms := append([]string{w.Device, w.Silicon}, q.stock.Parts(w.Silicon)...)
	for i := range nodes {
		terms = append(terms, nodes[i].terms()...)
	}
	seen := make(map[*account]bool)
	found := slices.Clone(x.withoutTerm)
	for _, term := range terms {
		for _, a := range x.byTerm[term] {
			if !seen[a] {
				seen[a] = true
				found = append(found, a)
			}
		}
	}
	found = slices.DeleteFunc(found, q.exemptsAccount)
	slices.SortFunc(found, func(a, b *account) int { return cmp.Compare(a.key, b.key) })
	return found
}

// query describes a query of the index: whether an owner may have the wanted devices.
type query struct {
	api           discovery.Mode
	owner         Owner
	ownKey        string         // key of the owner's entry, which does not block the owner
	onlyAPI       discovery.Mode // consider only entries of this API, those of both APIs if ""
	sameContainer *Grant         // a grant of the same container; see [Grant.With]
	previous      Owner          // if set, the entry with key own is exempt only if it belongs to this owner
	lease         *lease         // the lease that wants the devices; nil for a claim or a grant
	wanted        []Hold
	stock         Stock

	ending bool // whether grants that are ending block too, by either API
}

// exemptsAccount reports whether an account does not block the query: the owner's own entries, and
// leases for changes on behalf of the owner. Two devices that only wait for their resets do not
// wait for each other. A device that is withheld after its consumer has ended is withheld from that
// consumer too, because the key may be that of an ID which another container gets next.
func (q *query) exemptsAccount(a *account) bool {
	e, leased := a.entry.(*lease)
	switch {
	case leased && (e == q.lease || e.idle && q.previous != Owner{}):
		return true
	case q.ownKey == "":
		return false
	case q.sameContainer != nil && a.entry == Entry(q.sameContainer):
		return true
	case a.key == q.ownKey:
		return q.previous == Owner{} || a.entry.Owner() == q.previous
	}
	return a.key == sealedKey(q.ownKey) || leased && e.Consumer == q.ownKey && (q.lease != nil || e.withheldReason == "")
}

// findBlocked returns the first conflict of a query, nil if the owner may have the devices. All
// rules of exclusion are applied here.
func (x *index) findBlocked(q query) *Blocked {
	if b := x.blockedFunctions(&q); b != nil {
		return b
	}
	for i := range q.wanted {
		if b := x.blockedHold(q, i); b != nil {
			return b
		}
	}
	return nil
}

// blockedFunctions returns the lease that already covers one of the functions of the wanted lease.
func (x *index) blockedFunctions(q *query) *Blocked {
	if q.lease == nil {
		return nil
	}
	for _, function := range q.lease.Functions {
		for _, a := range x.byTerm[functionTerm(function)] {
			if e, ok := a.entry.(*lease); ok && e.has(function) && !q.exemptsAccount(a) {
				return a.newBlocked(q.lease.subject(), q.lease.subject(), a.ownerText(Owner{}))
			}
		}
	}
	return nil
}

func (x *index) blockedHold(q query, i int) *Blocked {
	w := complete(q.wanted[i], q.stock)
	if w.Open {
		return nil
	}
	nodes := NodesOf(w.Device, q.stock)
	balance := newBalance(&w, q.stock)
	for j := range q.wanted {
		if j != i {
			other := complete(q.wanted[j], q.stock)
			balance.add(&other) // the owner's other devices; a shortage shows when those of others are added
		}
	}
	for _, a := range x.candidateAccounts(&w, nodes, &q) {
		counts := a.blocksAPI(q.api) || q.ending && a.state == Ending
		if !counts || q.onlyAPI != "" && a.entry.API() != q.onlyAPI {
			continue
		}
		who := a.ownerText(q.owner)
		for _, h := range presentHolds(a.holds, q.stock) {
			if h.Open {
				continue
			}
			why := ""
			switch {
			case q.belongsToOther(a) && h.touchesHold(&w), h.excludesHold(&w):
				why = fmt.Sprintf("%s (device %s)", who, h.Device)
			case !h.touchesHold(&w) && h.hasNode(nodes) && !a.explainsNodes(&w, q.stock):
				why = fmt.Sprintf("%s, which was given its nodes as those of device %s", who, h.Device)
			default:
				if short := balance.add(&h); short != "" {
					why = fmt.Sprintf("%s: with its device %s, %s", who, h.Device, short)
				}
			}
			if why != "" {
				b := a.newBlocked(w.Device, h.Device, why)
				if g, ok := a.entry.(*Grant); ok && g.Container == "" && h.Device != w.Device && sameGroup(&h, &w) {
					b.Starting = g
				}
				return b
			}
		}
		if sealed, ok := a.entry.(*Sealed); ok && sealed.all {
			return &Blocked{Device: w.Device, Owner: sealed.Owner(), ownerText: sealed.ownerText()}
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

// belongsToOther reports whether an account belongs to the other API, which never has devices of
// the same physical device. Changes of the agent are judged by device, whatever API offers the
// device.
func (q *query) belongsToOther(a *account) bool {
	return q.lease == nil && !a.isChange() && a.entry.API() != q.api
}

// presentHolds returns the holds of an account as recorded, and a second time as they are at
// present if the device belongs to another physical device now. Functions become one physical
// device when passthrough is enabled for them, or when a function is plugged into their IOMMU
// group.
func presentHolds(holds []Hold, stock Stock) []Hold {
	all := make([]Hold, 0, len(holds))
	for _, h := range holds {
		h = complete(h, stock)
		all = append(all, h)
		if device, found := findPresent(h.Device, stock); found && device.Silicon() != h.Silicon {
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
	device, found := findPresent(h.Device, stock)
	switch {
	case found:
		h.Device, h.Silicon, h.Whole, h.Takes = device.Name, device.Silicon(), device.PartOf == nil, device.Takes
		h.Open = h.Open || device.Shareable
	case h.Silicon == "":
		h.Silicon, h.Whole = h.Device, true
	}
	return h
}

// findPresent finds the device with a name from a CDI spec or a file. The name may be that of a
// numbered share of a device that is not shared by number any more.
func findPresent(name string, stock Stock) (rules.Offered, bool) {
	device, found := stock.Device(name)
	if of, share := rules.ShareOf(name); !found && share {
		return stock.Device(of)
	}
	return device, found
}

// touchesHold reports whether both holds are on one physical device.
func (h *Hold) touchesHold(w *Hold) bool { return h.Silicon == w.Silicon || h.Device == w.Device }

// excludesHold reports whether hold h excludes the wanted hold, whatever other holds exist. Two
// parts of one physical device do not exclude each other, nor do two shares of one form: the
// balance decides whether there is enough for both.
func (h *Hold) excludesHold(w *Hold) bool {
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

// hasNode reports whether the hold includes one of the nodes.
func (h *Hold) hasNode(nodes []Node) bool {
	return slices.ContainsFunc(h.Nodes, func(mine Node) bool {
		return slices.ContainsFunc(nodes, func(n Node) bool {
			return mine.Path == n.Path || mine.hasNumbers() && mine.numberText() == n.numberText()
		})
	})
}

// explainsNodes reports whether the nodes of a grant may be those of the wanted device, because the
// owner has that device too. A grant records the nodes of all its devices together.
func (a *account) explainsNodes(w *Hold, stock Stock) bool {
	return a.entry.API() == discovery.ModeDevicePlugin && slices.ContainsFunc(a.holds, func(h Hold) bool {
		h = complete(h, stock)
		return h.touchesHold(w)
	})
}

// RenumberedNodes describes how the present nodes of devices differ from the given ones, as after
// cards were removed and found again. It returns "" if they do not differ, or if one of the devices
// is missing.
func RenumberedNodes(given []Node, devices []string, s Stock) string {
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
		case n.hasNumbers() && has[j].hasNumbers() && n.numberText() != has[j].numberText():
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
		if !d.Shareable && !except[d.Silicon()] && slices.ContainsFunc(NodesOf(name, s), func(n Node) bool { return n.Path == path }) {
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
