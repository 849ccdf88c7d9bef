package allocation

import (
	"bytes"
	"encoding/json"
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
)

// Sealed is the entry of a claim whose file is invalid, missing, or temporarily unreadable. The
// entry blocks the claim's known devices: the devices in the CDI spec, and the readable devices in
// the file.
type Sealed struct {
	UID             types.UID
	Namespace, Name string // of the claim, if a newer agent wrote the record
	Devices         []SealedDevice

	// AnyDevice is set if the devices are unknown: the claim may have any device without unlimited sharing.
	AnyDevice bool

	Unread      bool // the file exists, but reading it failed
	EarlierBoot bool // the entry is of an earlier boot and has no known devices
}

// SealedDevice is the known part of a device of a sealed entry.
type SealedDevice struct {
	Name    string // possibly the name of a share
	Silicon string // "" if not known
	Files   []discovery.HostFile
	Nodes   []Node // nodes of the claim
}

// Key is the claim's UID with a suffix, because the claim may have another entry too.
func (s *Sealed) Key() string { return SealedKey(string(s.UID)) }

// SealedKey returns the key of the sealed entry of a claim.
func SealedKey(uid string) string { return uid + " sealed" }

// API implements [Entry].
func (s *Sealed) API() discovery.Mode { return discovery.ModeDRA }

// Owner implements [Entry].
func (s *Sealed) Owner() Owner {
	return Owner{API: discovery.ModeDRA, Namespace: s.Namespace, Name: s.Name, UID: s.UID}
}

// Holds implements [Entry].
func (s *Sealed) Holds() []Hold {
	holds := make([]Hold, 0, len(s.Devices))
	for _, d := range s.Devices {
		holds = append(holds, Hold{Device: d.Name, Silicon: d.Silicon, Whole: true, Present: true, Nodes: d.Nodes})
	}
	return holds
}

// Files implements [Entry].
func (s *Sealed) Files() (files []discovery.HostFile) {
	for _, d := range s.Devices {
		files = append(files, d.Files...)
	}
	return files
}

// OwnerText names the owner in a message for other owners.
func (s *Sealed) OwnerText() string {
	if s.AnyDevice {
		return fmt.Sprintf("%s, whose record cannot be read: it may have any device, until it is unprepared", s.Owner())
	}
	return fmt.Sprintf("%s, whose record cannot be read", s.Owner())
}

// Seal returns the known part of a claim, from the data of its file, which may be nil, and the
// devices in its CDI spec. past is set if an earlier boot left the file.
func Seal(uid types.UID, data []byte, named []SealedDevice, boot string, past bool) *Sealed {
	s := &Sealed{UID: uid}
	damaged := true
	if body, err := verifyChecksum(data); err == nil {
		damaged = false // the checksum is valid: a newer agent wrote the file
		var c salvaged
		_ = json.Unmarshal(body, &c)
		if c.UID == uid {
			s.Namespace, s.Name = c.Namespace, c.Name
		}
		if c.Boot != "" && c.Boot != boot {
			return s
		}
	}
	_, body, _ := bytes.Cut(data, []byte("\n"))
	s.Devices = salvageDevices(body, boot)
	s.Devices = append(s.Devices, named...)
	s.AnyDevice = !past && len(named) == 0 && (damaged || len(s.Devices) == 0)
	s.EarlierBoot = past && len(s.Devices) == 0
	return s
}

// salvaged is the part of a record for reading invalid files, and for writing sealed entries
// without a file.
type salvaged struct {
	UID       types.UID        `json:"uid,omitempty"`
	Namespace string           `json:"namespace,omitempty"`
	Name      string           `json:"name,omitempty"`
	Boot      string           `json:"boot"`
	Results   []salvagedResult `json:"results"`
}

type salvagedResult struct {
	Device  string               `json:"device"`
	Source  string               `json:"source,omitempty"`
	Silicon string               `json:"silicon,omitempty"`
	Admin   bool                 `json:"admin,omitempty"`
	Files   []discovery.HostFile `json:"files,omitempty"`
	Nodes   []Node               `json:"nodes,omitempty"`
}

// Encode returns the record of a sealed entry. If the entry's devices are not all known, the record
// reads like a damaged file.
func (s *Sealed) Encode(boot string) ([]byte, error) {
	c := salvaged{UID: s.UID, Namespace: s.Namespace, Name: s.Name, Boot: boot}
	for _, d := range s.Devices {
		c.Results = append(c.Results, salvagedResult{Device: d.Name, Silicon: d.Silicon, Files: d.Files, Nodes: d.Nodes})
	}
	body, err := json.MarshalIndent(c, "", "  ")
	if err != nil || s.AnyDevice {
		return append([]byte("\n"), body...), err
	}
	return append([]byte(checksum(body)+"\n"), body...), nil
}

// salvageDevices returns the devices in an invalid file, with their physical devices, nodes and
// host files. The result is only good enough to block the devices and to remove the files.
func salvageDevices(body []byte, boot string) (devices []SealedDevice) {
	var c salvaged
	// A field of the wrong type is left out, and the rest is read.
	_ = json.Unmarshal(body, &c)
	if c.Boot != boot {
		return nil
	}
	for _, r := range c.Results {
		for _, name := range []string{r.Device, r.Source} {
			if name != "" && !r.Admin {
				devices = append(devices, SealedDevice{Name: name, Silicon: r.Silicon, Files: r.Files, Nodes: r.Nodes})
			}
		}
	}
	return devices
}
