package ledger

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
)

// Sealed is the entry of a claim whose file is not understood, is missing, or
// cannot be read at present. It keeps everybody from what is known of it: what
// the claim's CDI spec names, and what can be read of the file.
type Sealed struct {
	UID     types.UID
	Devices []SealedDevice

	// all says that not even that is known: it may be anything that is not open.
	all bool

	unread bool // the file is there, and reading it failed
	past   bool // it is of an earlier boot, and nothing is known of it
}

// SealedDevice is what is known of one device of a sealed entry.
type SealedDevice struct {
	Name    string // perhaps that of a share of it
	Silicon string // "" if it is not known
	Files   []discovery.HostFile
	Nodes   []Node // that the claim was given
}

// account returns the account of the entry.
func (s *Sealed) account() *account {
	if s.past {
		return newAccount(s, Past)
	}
	return newAccount(s, Given)
}

// Key is the claim's UID with a mark, since a claim may have an entry besides.
func (s *Sealed) Key() string { return sealedKey(string(s.UID)) }

func sealedKey(uid string) string { return uid + " sealed" }

// API implements [Entry].
func (s *Sealed) API() discovery.Mode { return discovery.ModeDRA }

// Owner implements [Entry].
func (s *Sealed) Owner() Owner { return Owner{API: discovery.ModeDRA, UID: s.UID} }

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

// describedBy returns the entry with the files of its devices as the snapshot has
// them, which goes before what a damaged file says. It may have been given the
// files of any device if it is not known which it has.
func (s *Sealed) describedBy(stock Stock) *Sealed {
	if stock == nil {
		return s
	}
	described := *s
	described.Devices = slices.Clone(s.Devices)
	if s.all {
		for _, name := range stock.Names() {
			described.Devices = append(described.Devices, SealedDevice{Name: name})
		}
	}
	for i := range described.Devices {
		if device, found := present(described.Devices[i].Name, stock); found {
			described.Devices[i].Files = device.FilesAs(device.Resource())
		}
	}
	return &described
}

// who names the owner for those who may not have what it has.
func (s *Sealed) who() string {
	if s.all {
		return fmt.Sprintf("%s, whose record cannot be read: it may have any device, until it is unprepared", s.Owner())
	}
	return fmt.Sprintf("%s, whose record cannot be read", s.Owner())
}

// seal returns what is known of a claim by its file, which may be nil, and by
// the devices that its CDI spec names. The past is what an earlier boot left.
func seal(uid types.UID, data []byte, named []SealedDevice, boot string, past bool) *Sealed {
	s := &Sealed{UID: uid}
	damaged := true
	if body, err := checked(data); err == nil {
		damaged = false // it is a newer agent's
		if of := bootOf(body); of != "" && of != boot {
			return s
		}
	}
	_, body, _ := bytes.Cut(data, []byte("\n"))
	s.Devices = salvage(body, boot)
	s.Devices = append(s.Devices, named...)
	s.all = !past && len(named) == 0 && (damaged || len(s.Devices) == 0)
	s.past = past && len(s.Devices) == 0
	return s
}

func bootOf(body []byte) string {
	var c struct{ Boot string }
	_ = json.Unmarshal(body, &c)
	return c.Boot
}

// salvaged is what is read of a file that is not understood, and written of a sealed
// entry whose file is gone.
type salvaged struct {
	Boot    string           `json:"boot"`
	Results []salvagedResult `json:"results"`
}

type salvagedResult struct {
	Device  string               `json:"device"`
	Source  string               `json:"source,omitempty"`
	Silicon string               `json:"silicon,omitempty"`
	Admin   bool                 `json:"admin,omitempty"`
	Files   []discovery.HostFile `json:"files,omitempty"`
	Nodes   []Node               `json:"nodes,omitempty"`
}

// file returns the bytes of a file that says of the entry what is known. Where that is
// not all, the file is as good as damaged.
func (s *Sealed) file(boot string) ([]byte, error) {
	c := salvaged{Boot: boot}
	for _, d := range s.Devices {
		c.Results = append(c.Results, salvagedResult{Device: d.Name, Silicon: d.Silicon, Files: d.Files, Nodes: d.Nodes})
	}
	body, err := json.MarshalIndent(c, "", "  ")
	if err != nil || s.all {
		return append([]byte("\n"), body...), err
	}
	return append([]byte(checksum(body)+"\n"), body...), nil
}

// salvage returns what a file still says of the devices: the names, the silicon
// and the files of the host that go with them. It is only good enough to keep
// others from the devices, and to remove the files.
func salvage(body []byte, boot string) (devices []SealedDevice) {
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
