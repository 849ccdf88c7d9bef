package ledger

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// Version is that of the files which this code writes.
const Version = 4

// readableBy is the oldest version whose agents may act on files of this one. Version 2
// added the number of shares, version 3 since when a claim has its devices, and version 4
// for whose limits the scheduler made a claim.
const readableBy = 1

// Claim is the entry of a claim: who has what, and all that is needed to write
// its outputs again. It is a type of our own, so that no update of a library
// changes what is on disk.
//
// On disk it is a line with the checksum of all that follows, and JSON.
//
// Agents are replaced by older ones too, while claims are prepared. Whatever is
// added to the format makes a new version, and a file says in ReadableBy the
// oldest version whose agents may act on it. That may be an older one if such
// an agent
//
//   - sees by the fields it knows no less taken than is,
//   - finds in the edits all that containers are to have, and can write them as
//     CDI, and
//   - may prepare the claim anew. It then keeps the version and the fields of
//     the claim and its results which it does not know, without knowing whether
//     they are still so: results of other devices have none of them, and what is
//     looked up at each Prepare (nodes, edits, files) has only what it knows.
//
// An agent sets a file aside that it may not act on, and keeps others from the
// devices all the same. Agents read the files of all versions before theirs.
type Claim struct {
	Version    int `json:"version"`              // of the agent that wrote it first
	ReadableBy int `json:"readableBy,omitempty"` // zero means that Version

	UID       types.UID `json:"uid"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	Boot      string    `json:"boot"` // the kernel's boot ID when it was prepared
	Results   []Result  `json:"results"`

	// Since is when the claim was given its allocation, in any boot. An agent of version 1
	// or 2 writes none.
	Since time.Time `json:"since,omitzero"`

	// Pod is the pod for whose limits the scheduler made the claim, "" of other claims.
	Pod string `json:"pod,omitempty"`

	// Configuring says that the devices are being made what the claim wants of
	// them: it has them, and no container may have them yet. It is set by
	// [Ledger.Give].
	Configuring bool `json:"configuring,omitempty"`

	// Users are the pods that the claim is reserved for while it is prepared. They are not in the file.
	Users []types.UID `json:"-"`

	unknown unknownFields
	raw     []byte // its file as it was read, nil if this code made it
}

// Result is one allocation result of a claim.
type Result struct {
	Request string    `json:"request"` // "request" or "request/subrequest"
	Pool    string    `json:"pool"`
	Device  string    `json:"device"` // as it was allocated
	ShareID types.UID `json:"shareID,omitempty"`
	Admin   bool      `json:"admin,omitempty"`  // keeps nobody out
	Shared  bool      `json:"shared,omitempty"` // the device is open

	// Resource is the name in the limits of the pod for which the scheduler made the claim,
	// "" of other claims, and where it was not known.
	Resource string `json:"resource,omitempty"`

	// The claim has all of the silicon, or takes of its counters. Claims that have
	// the device together consume its capacity.
	Silicon  string                                          `json:"silicon"`
	Whole    bool                                            `json:"whole,omitempty"`
	Takes    map[string]resource.Quantity                    `json:"takes,omitempty"`
	Consumes map[resourceapi.QualifiedName]resource.Quantity `json:"consumes,omitempty"`

	// Shares is into how many shares the device was cut, 0 if it was not shared by number
	// or an agent of version 1 wrote the file. The administrator may change the number.
	Shares int64 `json:"shares,omitempty"`

	// By what the device is known again.
	Source   string `json:"source"`             // name in the snapshot
	Identity string `json:"identity,omitempty"` // "" if it was unknown
	Driver   string `json:"driver,omitempty"`
	Nodes    []Node `json:"nodes,omitempty"` // as they were on the host: one for each node of the edits, then those of before

	CDI   string               `json:"cdi"` // name of the CDI device
	Edits specs.ContainerEdits `json:"edits"`
	Files []HostFile           `json:"files,omitempty"` // of the host, for others than the container

	unknown unknownFields
}

// HostFile is a file of the host that goes with a device.
type HostFile struct {
	Path string `json:"path"`
	Text string `json:"text"`
}

// Key is the claim's UID.
func (c *Claim) Key() string { return string(c.UID) }

// API implements [Entry].
func (c *Claim) API() discovery.Mode { return discovery.ModeDRA }

// Owner implements [Entry].
func (c *Claim) Owner() Owner {
	return Owner{API: discovery.ModeDRA, Namespace: c.Namespace, Name: c.Name, UID: c.UID}
}

// Named is the claim's name, which another claim may have had before it.
func (c *Claim) Named() types.NamespacedName {
	return types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
}

// Holds implements [Entry].
func (c *Claim) Holds() []Hold {
	holds := make([]Hold, 0, len(c.Results))
	for i := range c.Results {
		holds = append(holds, c.Results[i].Hold())
	}
	return holds
}

// Hold returns what a result has of its device.
func (r *Result) Hold() Hold {
	return Hold{
		Device: r.Source, Silicon: r.Silicon, Whole: r.Whole, Takes: r.Takes, Amount: r.Consumes,
		Form: formOf(r.Consumes, r.Shares), Shares: r.Shares, Open: r.Admin || r.Shared, Nodes: r.Nodes,
	}
}

// KeepNodes adds the nodes that the claim was given before: containers may go on with
// them, since pods have a claim together.
func (r *Result) KeepNodes(earlier *Result) {
	for _, n := range earlier.Nodes {
		if !slices.Contains(r.Nodes, n) {
			r.Nodes = append(r.Nodes, n)
		}
	}
}

// LastNodes returns the nodes that the claim was given last.
func (r *Result) LastNodes() []Node {
	return r.Nodes[:min(len(r.Nodes), len(r.Edits.DeviceNodes))]
}

// formOf returns the form of the shares that a claim has: by which capacities
// they are measured, and of how many they are. Shares of one capacity go together
// whatever their size.
func formOf(amounts Amounts, shares int64) string {
	names := make([]string, 0, len(amounts))
	for name := range amounts {
		names = append(names, string(name))
	}
	slices.Sort(names)
	form := strings.Join(names, ",")
	if shares > 0 {
		form += fmt.Sprintf(" of %d", shares)
	}
	return form
}

// Files implements [Entry].
func (c *Claim) Files() []discovery.HostFile {
	var files []discovery.HostFile
	for _, result := range c.Results {
		for _, f := range result.Files {
			files = append(files, discovery.HostFile(f))
		}
	}
	return files
}

// Find returns the result that stands for the same allocation as the other.
func (c *Claim) Find(other *Result) (*Result, bool) {
	if c == nil {
		return nil, false
	}
	i := slices.IndexFunc(c.Results, func(mine Result) bool { return mine.sameAllocation(other) })
	if i < 0 {
		return nil, false
	}
	return &c.Results[i], true
}

// SameAllocation reports whether both are of the same allocation.
func (c *Claim) SameAllocation(other *Claim) bool {
	return slices.EqualFunc(c.Results, other.Results, func(a, b Result) bool { return a.sameAllocation(&b) })
}

// sameAllocation reports whether both are of the same allocation result.
func (r *Result) sameAllocation(other *Result) bool {
	return r.Request == other.Request && r.Pool == other.Pool && r.Device == other.Device &&
		r.ShareID == other.ShareID && r.Admin == other.Admin
}

// Keep takes over what a newer agent wrote in an earlier entry of the same claim, and since when
// the claim has the allocation.
func (c *Claim) Keep(earlier *Claim) {
	if earlier == nil {
		return
	}
	c.unknown = earlier.unknown
	if c.SameAllocation(earlier) && !earlier.Since.IsZero() {
		c.Since = earlier.Since
	}
	if earlier.Version > c.Version {
		c.Version, c.ReadableBy = earlier.Version, earlier.ReadableBy
	}
	for i := range c.Results {
		if same, found := earlier.Find(&c.Results[i]); found {
			c.Results[i].unknown = same.unknown
		}
	}
}

// file returns the bytes of the claim's file: one that was read as it was, with
// all that this code does not know of it.
func (c *Claim) file() ([]byte, error) {
	if c.raw != nil {
		return c.raw, nil
	}
	body, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	body = append(body, '\n')
	return append([]byte(checksum(body)+"\n"), body...), nil
}

// DecodeClaim reads a claim's file.
func DecodeClaim(data []byte) (*Claim, error) {
	body, err := checked(data)
	if err != nil {
		return nil, err
	}
	c := &Claim{raw: data}
	if err := json.Unmarshal(body, c); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	if err := c.understood(Version); err != nil {
		return nil, err
	}
	if err := c.complete(); err != nil {
		return nil, err
	}
	if c.Version > Version {
		if err := checkEdits(body); err != nil {
			return nil, fmt.Errorf("version %d: %w", c.Version, err)
		}
	}
	return c, nil
}

// checked returns what follows the checksum of a file, which is right.
func checked(data []byte) (body []byte, err error) {
	sum, body, found := bytes.Cut(data, []byte("\n"))
	if !found {
		return nil, errors.New("no checksum")
	}
	if string(sum) != checksum(body) {
		return nil, errors.New("checksum does not match")
	}
	return body, nil
}

// understood reports why an agent that writes the version may not act on this
// claim.
func (c *Claim) understood(version int) error {
	readableBy := c.ReadableBy
	if readableBy == 0 {
		readableBy = c.Version
	}
	switch {
	case c.Version < 1 || readableBy < 1 || readableBy > c.Version:
		return fmt.Errorf("version is %d, readable by %d", c.Version, c.ReadableBy)
	case readableBy > version:
		return fmt.Errorf("version is %d, readable by agents of version %d and later; this one's is %d", c.Version, readableBy, version)
	}
	return nil
}

// complete reports what a claim lacks that all have: without it nobody would
// be kept from what the claim has.
func (c *Claim) complete() error {
	if c.UID == "" || c.Boot == "" {
		return errors.New("lacks the claim's UID or the boot ID")
	}
	for i, result := range c.Results {
		if result.Device == "" || result.Silicon == "" || result.Source == "" || result.CDI == "" {
			return fmt.Errorf("result %d lacks the names of its device", i)
		}
	}
	return nil
}

// checkEdits reports what this code does not know of the edits in a file, and
// would leave out of a CDI spec.
func checkEdits(body []byte) error {
	var c struct {
		Results []struct{ Edits json.RawMessage }
	}
	if err := json.Unmarshal(body, &c); err != nil {
		return err
	}
	for i, result := range c.Results {
		strict := json.NewDecoder(bytes.NewReader(result.Edits))
		strict.DisallowUnknownFields()
		if err := strict.Decode(&specs.ContainerEdits{}); err != nil {
			return fmt.Errorf("result %d: edits: %w", i, err)
		}
	}
	return nil
}

func checksum(body []byte) string {
	sum := sha256.Sum256(body)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// unknownFields are fields of a JSON object that this code does not know.
type unknownFields map[string]json.RawMessage

// UnmarshalJSON keeps unknown fields.
func (c *Claim) UnmarshalJSON(data []byte) (err error) {
	type plain Claim
	if err := json.Unmarshal(data, (*plain)(c)); err != nil {
		return err
	}
	c.unknown, err = unknownOf(data, plain{})
	return err
}

// MarshalJSON writes unknown fields too.
func (c *Claim) MarshalJSON() ([]byte, error) {
	type plain Claim
	return withUnknown((*plain)(c), c.unknown)
}

// UnmarshalJSON keeps unknown fields.
func (r *Result) UnmarshalJSON(data []byte) (err error) {
	type plain Result
	if err := json.Unmarshal(data, (*plain)(r)); err != nil {
		return err
	}
	r.unknown, err = unknownOf(data, plain{})
	return err
}

// MarshalJSON writes unknown fields too. It is declared on the value because
// results are encoded as elements of a list.
func (r Result) MarshalJSON() ([]byte, error) {
	type plain Result
	return withUnknown(plain(r), r.unknown)
}

// unknownOf returns the fields of a JSON object that the struct does not have.
func unknownOf(data []byte, known any) (unknownFields, error) {
	var fields unknownFields
	if err := json.Unmarshal(data, &fields); err != nil {
		return nil, err
	}
	for field := range reflect.TypeOf(known).Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		// The decoder takes names in any case.
		maps.DeleteFunc(fields, func(key string, _ json.RawMessage) bool { return name != "" && strings.EqualFold(key, name) })
	}
	if len(fields) == 0 {
		return nil, nil
	}
	return fields, nil
}

// withUnknown encodes a struct and adds the fields to it, in name order.
func withUnknown(known any, unknown unknownFields) ([]byte, error) {
	data, err := json.Marshal(known)
	if err != nil || len(unknown) == 0 {
		return data, err
	}
	more, err := json.Marshal(unknown)
	if err != nil {
		return nil, err
	}
	return slices.Concat(data[:len(data)-1], []byte(","), more[1:]), nil
}
