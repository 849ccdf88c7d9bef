package driver

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"reflect"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
)

// recordVersion is that of the records which this code writes.
const recordVersion = 1

// record is what is written down of a prepared claim: who holds what, and all
// that is needed to write its CDI spec again. It is a type of our own, so that
// no update of a library changes what is on disk.
//
// On disk it is a line with the checksum of all that follows, and JSON.
//
// Agents are replaced by older ones too, while claims are held. Whatever is
// added to the format makes a new version, and a record says in ReadableBy the
// oldest version whose agents may act on it. That may be an older one if such
// an agent
//
//   - sees by the fields it knows no less held than is,
//   - finds in the edits all that containers are to have, and can write them as
//     CDI, and
//   - may prepare the claim anew. It then keeps the version and the fields of
//     the record and its results which it does not know, without knowing whether
//     they are still so: results of other devices have none of them, and what is
//     looked up at each Prepare (nodes, edits, files) has only what it knows.
//
// What an agent may not act on it sets aside, and it keeps others from the
// devices all the same. Agents read the records of all versions before theirs.
type record struct {
	Version    int `json:"version"`              // of the agent that wrote it first
	ReadableBy int `json:"readableBy,omitempty"` // zero means that Version

	UID       types.UID `json:"uid"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	Boot      string    `json:"boot"` // the kernel's boot ID when it was prepared
	Results   []result  `json:"results"`

	// Configuring says that the devices are being made what the claim wants of
	// them: it holds them, and no container may have them yet.
	Configuring bool `json:"configuring,omitempty"`

	unknown unknownFields
	raw     []byte // its file as it was read, nil if this code made it
}

// result is one allocation result of a claim.
type result struct {
	Request string    `json:"request"` // "request" or "request/subrequest"
	Pool    string    `json:"pool"`
	Device  string    `json:"device"` // as it was allocated
	ShareID types.UID `json:"shareID,omitempty"`
	Admin   bool      `json:"admin,omitempty"`  // holds nothing
	Shared  bool      `json:"shared,omitempty"` // may be held by others besides

	// What the result holds: all of the silicon, or what it takes of it. Claims
	// that have the device together consume of its capacity.
	Silicon  string                                          `json:"silicon"`
	Whole    bool                                            `json:"whole,omitempty"`
	Takes    map[string]resource.Quantity                    `json:"takes,omitempty"`
	Consumes map[resourceapi.QualifiedName]resource.Quantity `json:"consumes,omitempty"`

	// By what the device is known again.
	Source   string `json:"source"`             // name in the snapshot
	Identity string `json:"identity,omitempty"` // "" if it was unknown
	Driver   string `json:"driver,omitempty"`
	Nodes    []node `json:"nodes,omitempty"` // as they were on the host

	CDI   string               `json:"cdi"` // name of the CDI device
	Edits specs.ContainerEdits `json:"edits"`
	Files []hostFile           `json:"files,omitempty"` // of the host, for others than the container

	unknown unknownFields
}

// hostFile is a file of the host that goes with a device.
type hostFile struct {
	Path string `json:"path"`
	Text string `json:"text"`
}

// node is a device node as it was found on the host.
type node struct {
	Path  string `json:"path"`
	Type  string `json:"type"` // "c", "b" or "p"
	Major uint32 `json:"major,omitempty"`
	Minor uint32 `json:"minor,omitempty"`
}

// who names the claim for those who may not have what it holds.
func (r *record) who() string {
	if r.Name == "" {
		return fmt.Sprintf("claim with UID %s", r.UID)
	}
	return fmt.Sprintf("claim %s/%s", r.Namespace, r.Name)
}

// whoBefore names the claim for another, which may have the name that this one
// had before it.
func (r *record) whoBefore(other *record) string {
	if r.named() == other.named() {
		return fmt.Sprintf("an earlier %s with UID %s", r.who(), r.UID)
	}
	return r.who()
}

// named is the claim's name, which another claim may have had before it.
func (r *record) named() types.NamespacedName {
	return types.NamespacedName{Namespace: r.Namespace, Name: r.Name}
}

// devices returns what the claim's CDI spec holds.
func (r *record) devices() []cdi.Device {
	devices := make([]cdi.Device, 0, len(r.Results))
	for _, result := range r.Results {
		devices = append(devices, cdi.Device{Name: result.CDI, Edits: result.Edits})
	}
	return devices
}

// files returns the files of the host that go with what the claim has.
func (r *record) files() []discovery.HostFile {
	var files []discovery.HostFile
	if r == nil {
		return nil
	}
	for _, result := range r.Results {
		for _, f := range result.Files {
			files = append(files, discovery.HostFile(f))
		}
	}
	return files
}

// find returns the result that stands for the same allocation as the other.
func (r *record) find(other *result) (*result, bool) {
	if r == nil {
		return nil, false
	}
	i := slices.IndexFunc(r.Results, func(mine result) bool { return mine.sameAllocation(other) })
	if i < 0 {
		return nil, false
	}
	return &r.Results[i], true
}

// sameAllocation reports whether both are of the same allocation.
func (r *record) sameAllocation(other *record) bool {
	return slices.EqualFunc(r.Results, other.Results, func(a, b result) bool { return a.sameAllocation(&b) })
}

// sameAllocation reports whether both are of the same allocation result.
func (r *result) sameAllocation(other *result) bool {
	return r.Request == other.Request && r.Pool == other.Pool && r.Device == other.Device &&
		r.ShareID == other.ShareID && r.Admin == other.Admin
}

// keepUnknown takes over what a newer agent wrote in an earlier record of the
// same claim.
func (r *record) keepUnknown(earlier *record) {
	if earlier == nil {
		return
	}
	r.unknown = earlier.unknown
	if earlier.Version > r.Version {
		r.Version, r.ReadableBy = earlier.Version, earlier.ReadableBy
	}
	for i := range r.Results {
		if same, found := earlier.find(&r.Results[i]); found {
			r.Results[i].unknown = same.unknown
		}
	}
}

// excludes reports whether a claim that holds r keeps others from having what
// is wanted, whatever else is held. Of two parts of one piece of silicon that
// is not so, nor of two shares of one device: what they take together is for
// the caller to add up.
func (r *result) excludes(wanted *result) bool {
	switch {
	case r.Admin || wanted.Admin:
		return false
	case r.Source == wanted.Source:
		return (!r.Shared || !wanted.Shared) && (r.Consumes == nil || wanted.Consumes == nil)
	case r.Shared || wanted.Shared || r.Silicon != wanted.Silicon:
		return false
	}
	return r.Whole || wanted.Whole
}

// encode returns the bytes of a record's file.
func (r *record) encode() ([]byte, error) {
	body, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	body = append(body, '\n')
	return append([]byte(checksum(body)+"\n"), body...), nil
}

// decodeRecord reads a record's file.
func decodeRecord(data []byte) (*record, error) {
	sum, body, found := bytes.Cut(data, []byte("\n"))
	if !found {
		return nil, errors.New("no checksum")
	}
	if string(sum) != checksum(body) {
		return nil, errors.New("checksum does not match")
	}
	r := &record{raw: data}
	if err := json.Unmarshal(body, r); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	if err := r.understood(recordVersion); err != nil {
		return nil, err
	}
	if err := r.complete(); err != nil {
		return nil, err
	}
	if r.Version > recordVersion {
		if err := checkEdits(body); err != nil {
			return nil, fmt.Errorf("version %d: %w", r.Version, err)
		}
	}
	return r, nil
}

// understood reports why an agent whose own records are of the version may not
// act on this one.
func (r *record) understood(version int) error {
	readableBy := r.ReadableBy
	if readableBy == 0 {
		readableBy = r.Version
	}
	switch {
	case r.Version < 1 || readableBy < 1 || readableBy > r.Version:
		return fmt.Errorf("version is %d, readable by %d", r.Version, r.ReadableBy)
	case readableBy > version:
		return fmt.Errorf("version is %d, readable by agents of version %d and later; this one's is %d", r.Version, readableBy, version)
	}
	return nil
}

// complete reports what a record lacks that all have: without it nobody would
// be kept from what the claim holds.
func (r *record) complete() error {
	if r.UID == "" || r.Boot == "" {
		return errors.New("lacks the claim's UID or the boot ID")
	}
	for i, result := range r.Results {
		if result.Device == "" || result.Silicon == "" || result.Source == "" || result.CDI == "" {
			return fmt.Errorf("result %d lacks the names of its device", i)
		}
	}
	return nil
}

// checkEdits reports what this code does not know of the edits in a record, and
// would leave out of its CDI spec.
func checkEdits(body []byte) error {
	var r struct {
		Results []struct{ Edits json.RawMessage }
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return err
	}
	for i, result := range r.Results {
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
func (r *record) UnmarshalJSON(data []byte) (err error) {
	type plain record
	if err := json.Unmarshal(data, (*plain)(r)); err != nil {
		return err
	}
	r.unknown, err = unknownOf(data, plain{})
	return err
}

// MarshalJSON writes unknown fields too.
func (r *record) MarshalJSON() ([]byte, error) {
	type plain record
	return withUnknown((*plain)(r), r.unknown)
}

// UnmarshalJSON keeps unknown fields.
func (r *result) UnmarshalJSON(data []byte) (err error) {
	type plain result
	if err := json.Unmarshal(data, (*plain)(r)); err != nil {
		return err
	}
	r.unknown, err = unknownOf(data, plain{})
	return err
}

// MarshalJSON writes unknown fields too. It is declared on the value because
// results are encoded as elements of a list.
func (r result) MarshalJSON() ([]byte, error) {
	type plain result
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

// typeOf returns the type of a device node as CDI writes it, "" if the file is
// no device node.
func typeOf(mode fs.FileMode) string {
	switch {
	case mode&fs.ModeCharDevice != 0:
		return "c"
	case mode&fs.ModeDevice != 0:
		return "b"
	case mode&fs.ModeNamedPipe != 0:
		return "p"
	}
	return ""
}
