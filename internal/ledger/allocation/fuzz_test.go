package allocation

import (
	"bytes"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Reading any content of the record of a claim ends, and each claim can be written and read again.
func FuzzDecodeClaim(f *testing.F) {
	c := NewClaim("uid-c", "default", "c", "boot-1")
	edits := specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/dri/renderD128", Type: "c", Major: 226, Minor: 128}}}
	c.Results = []Result{
		{Request: "r", Pool: "node", Device: "a", Source: "a", Silicon: "a", Whole: true, Identity: "uuid-of-a", Nodes: NodesIn(edits.DeviceNodes), CDI: "uid-c-0-a", Edits: edits},
		{Request: "r", Pool: "node", Device: "p0", Source: "p0", Silicon: "card", Takes: Counters{"slices": resource.MustParse("4")}, CDI: "uid-c-1-p0"},
	}
	data, err := c.Encode()
	if err != nil {
		f.Fatal(err)
	}
	_, body, _ := bytes.Cut(data, []byte("\n"))
	f.Add(body, true)
	f.Add([]byte(`{"version":2,"Version":3,"readableBy":1,"uid":"u","boot":"b","results":[{"x":null,"device":"a","silicon":"s","source":"a","cdi":"c","edits":{"deviceNodes":[null]}}],"y":{}}`), true)
	f.Add([]byte("sha256:\n"), false)
	f.Fuzz(func(t *testing.T, body []byte, right bool) {
		data := body
		if right {
			data = append([]byte(checksum(body)+"\n"), body...)
		}
		Seal("u", data, nil, "boot-1", false).Holds()
		c, err := DecodeClaim(data)
		if err != nil {
			return
		}
		c.Holds()
		c.Files()
		c.raw = nil
		again, err := c.Encode()
		if err != nil {
			t.Fatalf("what was read cannot be written: %v", err)
		}
		if _, err := DecodeClaim(again); err != nil {
			t.Fatalf("what was written cannot be read: %v\n%s", err, again)
		}
	})
}

// Reading any content of the file of grants ends, and each grant can be written and read again.
func FuzzDecodeGrants(f *testing.F) {
	f.Add([]byte(`[{"resource":"a.b/c","id":"1","devices":["gpu"],"since":"2026-01-02T03:04:05Z"},null]`))
	f.Add([]byte(`[{"id":"1"}]`))
	f.Add([]byte(`[{"resource":"amd.com/gpu","id":"0000:19:00.0","devices":["a"],"silicon":["a"],"exclusive":true,"since":"2026-11-22T03:00:00Z","container":"default/pod main","x":1},null]`))
	f.Fuzz(func(t *testing.T, data []byte) {
		grants, err := DecodeGrants(data)
		if err != nil {
			return
		}
		for _, g := range grants {
			g.Holds()
			_ = g.Owner().String()
		}
		written, err := EncodeGrants(grants)
		if err != nil {
			return // a time outside the range of JSON
		}
		if again, err := DecodeGrants(written); err != nil || len(again) != len(grants) {
			t.Errorf("%d grants, then %d: %v", len(grants), len(again), err)
		}
	})
}
