package allocation

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

// Version is the version of the files that this code writes.
const Version = 4

// readableBy is the oldest version whose agents may act on files of this version. Version 2 added
// the number of shares, version 3 the time of the allocation, and version 4 the pod for whose
// limits the scheduler made a claim.
const readableBy = 1

// Claim is the entry of a claim: the allocated devices, and all data needed to write the outputs
// again. It is independent of library types, so that no update of a library changes the format on
// disk.
//
// On disk a claim is a line with the checksum of the rest, followed by JSON.
//
// An agent may be replaced by an older one while claims are prepared. Every addition to the format
// gets a new version, and a file names in ReadableBy the oldest version whose agents may act on the
// file. That may be an older version if an agent of that version
//
//   - sees in its known fields at least as much taken as is taken,
//   - finds in the edits everything that containers need, and can write the edits as CDI, and
//   - may prepare the claim again. Such an agent keeps the version, and the unknown fields of the
//     claim and its results, without a check whether they still apply: results of other devices
//     have none of them, and the data that each Prepare looks up (nodes, edits, files) has only the
//     known fields.
//
// An agent sets a file aside if it may not act on the file, and still withholds the devices. Agents
// read the files of all versions before their own.
type Claim struct {
	Version    int `json:"version"`              // version of the agent that wrote the claim first
	ReadableBy int `json:"readableBy,omitempty"` // zero means the value of Version

	UID       types.UID `json:"uid"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	Boot      string    `json:"boot"` // the kernel's boot ID when the claim was prepared
	Results   []Result  `json:"results"`

	// Since is when the claim got its allocation, in any boot. Agents of versions 1 and 2 do not
	// write it.
	Since time.Time `json:"since,omitzero"`

	// Pod is the pod for whose limits the scheduler made the claim, "" for other claims.
	Pod string `json:"pod,omitempty"`

	// Configuring means that the devices are being configured for the claim: the claim has them,
	// but no container may have them yet. AllocateClaim of the ledger sets it.
	Configuring bool `json:"configuring,omitempty"`

	// Users are the pods in the claim's reservedFor while the claim is prepared. The file omits
	// them.
	Users []types.UID `json:"-"`

	// WithoutStatus means that the claim had no status of this driver's devices when it was prepared.
	// The file omits it.
	WithoutStatus bool `json:"-"`

	unknown unknownFields
	raw     []byte // the file as it was read, nil if this code made the claim
}

// Result is one allocation result of a claim.
type Result struct {
	Request string    `json:"request"` // "request" or "request/subrequest"
	Pool    string    `json:"pool"`
	Device  string    `json:"device"` // the name in the allocation
	ShareID types.UID `json:"shareID,omitempty"`
	Admin   bool      `json:"admin,omitempty"`  // excludes no other consumer
	Shared  bool      `json:"shared,omitempty"` // the device has unlimited sharing

	// Resource is the resource name in the limits of the pod for which the scheduler made the
	// claim, "" for other claims, and where the name was not known.
	Resource string `json:"resource,omitempty"`

	// The claim has the whole physical device, or takes of its counters. Claims that share the
	// device consume its capacity.
	Silicon  string                                          `json:"silicon"`
	Whole    bool                                            `json:"whole,omitempty"`
	Takes    map[string]resource.Quantity                    `json:"takes,omitempty"`
	Consumes map[resourceapi.QualifiedName]resource.Quantity `json:"consumes,omitempty"`

	// Shares is the number of shares of the device, 0 if the device was not shared by number or if
	// an agent of version 1 wrote the file. The administrator may change the number.
	Shares int64 `json:"shares,omitempty"`

	// The following fields identify the device.
	Source   string `json:"source"`             // name in the snapshot
	Identity string `json:"identity,omitempty"` // "" if it was unknown
	Driver   string `json:"driver,omitempty"`
	Nodes    []Node `json:"nodes,omitempty"` // nodes of the host: first one for each node of the edits, then earlier ones

	CDI   string               `json:"cdi"` // name of the CDI device
	Edits specs.ContainerEdits `json:"edits"`
	Files []HostFile           `json:"files,omitempty"` // files of the host for readers outside the container

	unknown unknownFields
}

// HostFile is a file of the host that belongs to a device.
type HostFile struct {
	Path string `json:"path"`
	Text string `json:"text"`
}

// NewClaim returns a claim without devices, allocated now in a boot.
func NewClaim(uid types.UID, namespace, name, boot string) *Claim {
	return &Claim{Version: Version, ReadableBy: readableBy, UID: uid, Namespace: namespace, Name: name, Boot: boot, Since: time.Now().UTC().Truncate(time.Second)}
}

// Key returns the claim's UID.
func (c *Claim) Key() string { return string(c.UID) }

// API implements [Entry].
func (c *Claim) API() discovery.Mode { return discovery.ModeDRA }

// Owner implements [Entry].
func (c *Claim) Owner() Owner {
	return Owner{API: discovery.ModeDRA, Namespace: c.Namespace, Name: c.Name, UID: c.UID}
}

// Named returns the namespace and name of the claim. An earlier claim may have had the same name.
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

// Hold returns the hold of a result on its device.
func (r *Result) Hold() Hold {
	return Hold{
		Device: r.Source, Silicon: r.Silicon, Whole: r.Whole, Takes: r.Takes, Amount: r.Consumes,
		Form: formOf(r.Consumes, r.Shares), Shares: r.Shares, Open: r.Admin || r.Shared, Nodes: r.Nodes,
	}
}

// IsChosen reports whether the allocation has the common name of interchangeable devices, and the
// driver has chosen Source among them.
func (r *Result) IsChosen() bool { return r.Device != r.Source && !r.Shared && r.Consumes == nil }

// GivenDevice returns the name of the device in the allocation, or of the chosen device.
func (r *Result) GivenDevice() string {
	if r.IsChosen() {
		return r.Source
	}
	return r.Device
}

// InterfaceName returns the name in the container of the interface moved to it, or "".
func (r *Result) InterfaceName() string {
	if len(r.Edits.NetDevices) != 1 {
		return ""
	}
	return r.Edits.NetDevices[0].Name
}

// KeepNodes adds the nodes that the claim was given before. Several pods may share a claim, so
// earlier containers may still use these nodes.
func (r *Result) KeepNodes(nodes []Node) {
	for _, n := range nodes {
		if !slices.Contains(r.Nodes, n) {
			r.Nodes = append(r.Nodes, n)
		}
	}
}

// LastNodes returns the nodes that the claim was given last.
func (r *Result) LastNodes() []Node {
	return r.Nodes[:min(len(r.Nodes), len(r.Edits.DeviceNodes))]
}

// formOf returns the form of a claim's shares: the capacities that measure the shares, and the
// number of shares. Shares of the same capacities are compatible whatever their sizes.
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

// Find returns the result for the same allocation as the other result. The claim may be nil.
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

// SourcesOf returns the chosen devices of the results for the same allocation as the other result.
// The claim may be nil. An allocation loses its ShareID when the API server is downgraded to a version
// without consumable capacity.
func (c *Claim) SourcesOf(other *Result) (sources []string) {
	if c == nil {
		return nil
	}
	for i := range c.Results {
		r := c.Results[i]
		if other.ShareID == "" {
			r.ShareID = ""
		}
		if r.IsChosen() && r.isSameResult(other) {
			sources = append(sources, r.Source)
		}
	}
	return sources
}

// SameAllocation reports whether both claims have the same allocation and the same chosen devices.
func (c *Claim) SameAllocation(other *Claim) bool {
	return slices.EqualFunc(c.Results, other.Results, func(a, b Result) bool { return a.sameAllocation(&b) })
}

// sameAllocation reports whether both are the same allocation result, with the same chosen device.
func (r *Result) sameAllocation(other *Result) bool {
	return r.isSameResult(other) && (r.Source == other.Source || !r.IsChosen())
}

// isSameResult reports whether both are of the same allocation result.
func (r *Result) isSameResult(other *Result) bool {
	return r.Request == other.Request && r.Pool == other.Pool && r.Device == other.Device &&
		r.ShareID == other.ShareID && r.Admin == other.Admin
}

// KeepUnknown copies from an earlier entry of the same claim the fields that a newer agent wrote,
// and the time of the allocation.
func (c *Claim) KeepUnknown(earlier *Claim) {
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

// Encode returns the bytes of the claim's file. A claim that was read from a file returns the bytes
// of that file, unknown fields included.
func (c *Claim) Encode() ([]byte, error) {
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

// DecodeClaim decodes a claim's file.
func DecodeClaim(data []byte) (*Claim, error) {
	body, err := verifyChecksum(data)
	if err != nil {
		return nil, err
	}
	c := &Claim{raw: data}
	if err := json.Unmarshal(body, c); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	if err := c.checkVersion(Version); err != nil {
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

// verifyChecksum verifies the checksum of a file and returns the rest of the file.
func verifyChecksum(data []byte) (body []byte, err error) {
	sum, body, found := bytes.Cut(data, []byte("\n"))
	if !found {
		return nil, errors.New("no checksum")
	}
	if string(sum) != checksum(body) {
		return nil, errors.New("checksum does not match")
	}
	return body, nil
}

// checkVersion returns an error if an agent that writes the given version may not act on this
// claim.
func (c *Claim) checkVersion(version int) error {
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

// complete returns an error if a required field is missing. Without these fields the claim's
// devices could not be withheld from other consumers.
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

// checkEdits returns an error if the edits in a file have fields that this code would omit from a
// CDI spec.
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

// unknownFields are the fields of a JSON object that this code does not define.
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

// MarshalJSON writes unknown fields too. The receiver is a value because results are encoded as
// elements of a list.
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
		// The decoder ignores the case of names.
		maps.DeleteFunc(fields, func(key string, _ json.RawMessage) bool { return name != "" && strings.EqualFold(key, name) })
	}
	if len(fields) == 0 {
		return nil, nil
	}
	return fields, nil
}

// withUnknown encodes a struct and appends the unknown fields in name order.
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
