package driver

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

// A record that an older agent set aside is restored by an agent that can read it.
func TestRecordThatWasSetAsideIsReadAgain(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1))
	c := claim("c", "a")
	mustPrepare(t, b, c)
	data, err := os.ReadFile(b.recordFile(c))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(b.recordFile(c), reseal(data, age, `"version": 5`), 0o600); err != nil {
		t.Fatal(err)
	}
	b.restart()
	bad := strings.TrimSuffix(b.recordFile(c), ".record") + ".bad" + "0"
	if !exists(bad) || exists(b.recordFile(c)) {
		t.Fatal("the record was not set aside")
	}
	b.restart() // set aside once more by this agent
	if !exists(bad) {
		t.Fatal("it is not aside any more")
	}
	if err := os.WriteFile(bad, data, 0o600); err != nil { // readable for a newer agent
		t.Fatal(err)
	}
	b.restart().offers(gpu("a", 1))
	if exists(bad) || !exists(b.recordFile(c)) || !b.holds(c.UID) || b.ledger.IsSealed(c.UID) {
		t.Error("the record is not the claim's again")
	}
	if err := b.tryUnprepare(c); err != nil || exists(b.recordFile(c)) || exists(b.specFile(c)) {
		t.Errorf("unprepare: %v", err)
	}
}

func TestUnreadableRecordKeepsHolding(t *testing.T) {
	damages := map[string]func([]byte) []byte{
		"truncated":      func(data []byte) []byte { return data[:len(data)/2] },
		"empty":          func([]byte) []byte { return nil },
		"one bit":        func(data []byte) []byte { data[len(data)/2] ^= 1; return data },
		"of a newer age": func(data []byte) []byte { return reseal(data, age, `"version": 5`) },
		"for newer readers": func(data []byte) []byte {
			return reseal(data, age, `"version": 6, "readableBy": 5`)
		},
		"of no age":      func(data []byte) []byte { return reseal(data, age, `"version": 0`) },
		"without a boot": func(data []byte) []byte { return reseal(data, `"boot": "boot-1"`, `"boot": ""`) },
		"without a name": func(data []byte) []byte { return reseal(data, `"silicon": "a"`, `"chip": "a"`) },
		"with edits of a newer age": func(data []byte) []byte {
			data = reseal(data, age, `"version": 5, "readableBy": 4`)
			return reseal(data, `"hostPath": "/dev/a"`, `"hostPath": "/dev/a", "cgroup": "x"`)
		},
		"of another": func(data []byte) []byte { return reseal(data, `"uid": "uid-c"`, `"uid": "uid-x"`) },
	}
	nameless := []string{"truncated", "empty", "one bit", "of another"}
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			devices := []rules.Offered{gpu("a", 1), gpu("b", 2), pooltest.PartDevice("g", "g-a", 7), pooltest.PartDevice("g", "g-b", 1)}
			b := newBench(t).restart().offers(devices...)
			c := claim("c", "a", "g-b")
			mustPrepare(t, b, c)
			data, err := os.ReadFile(b.recordFile(c))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(b.recordFile(c), damage(data), 0o600); err != nil {
				t.Fatal(err)
			}
			owner := "claim default/c"
			if slices.Contains(nameless, name) {
				owner = "claim with UID uid-c"
			}
			for range 2 { // the second start finds the record set aside
				b.restart().offers(devices...)
				if exists(b.recordFile(c)) || !exists(filepath.Join(b.records(), "uid-c.bad0")) {
					t.Fatal("it is not set aside")
				}
				if !exists(b.specFile(c)) {
					t.Error("its spec was swept")
				}
				for _, device := range []string{"a", "g-a", "g-b"} {
					mustRefuse(t, b, claim("other", device), "in use by "+owner)
				}
				for silicon, want := range map[string]bool{"a": true, "g": true, "b": false} {
					if _, held := b.OwnerOf(silicon); held != want {
						t.Errorf("OwnerOf(%s) says %v", silicon, held)
					}
				}
				mustPrepare(t, b, claim("free", "b"))
				if err := b.tryUnprepare(claim("free")); err != nil {
					t.Fatal(err)
				}
			}
			mustPrepare(t, b, c) // the claim itself may be prepared again
			if !exists(filepath.Join(b.records(), "uid-c.bad0")) {
				t.Error("what was set aside was deleted")
			}
			for range 2 {
				if err := b.tryUnprepare(c); err != nil {
					t.Fatal(err)
				}
			}
			if entries, _ := filepath.Glob(filepath.Join(b.records(), "uid-c*")); len(entries) > 0 {
				t.Errorf("left: %v", entries)
			}
			mustPrepare(t, b, claim("other", "a", "g-a"))
		})
	}
}

// If only the CDI spec of a numbered share is readable, the device is found by the name of the
// share.
func TestUnreadableRecordOfANumberedShare(t *testing.T) {
	b := newBench(t).restart().offers(byNumber("a", 2))
	c := claim("c", "a-share-00")
	mustPrepare(t, b, c)
	if err := os.WriteFile(b.recordFile(c), []byte("noise"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.restart().offers(byNumber("a", 2))
	mustRefuse(t, b, claim("whole", "a"), "in use by claim with UID uid-c")
	if _, held := b.OwnerOf("a"); !held {
		t.Error("the device plugin API gets no owner")
	}
}

// age is the text in a record about the agents that can read it.
const age = `"version": 4,
  "readableBy": 1`

// reseal changes a record and updates its checksum.
func reseal(data []byte, before, after string) []byte {
	_, body, _ := bytes.Cut(data, []byte("\n"))
	changed := bytes.Replace(body, []byte(before), []byte(after), 1)
	return append([]byte(checksum(changed)+"\n"), changed...)
}

func TestUnreadableRecordWithoutSpecHoldsWhatItStillNames(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1))
	c := claim("c", "a")
	mustPrepare(t, b, c)
	data, _ := os.ReadFile(b.recordFile(c))
	if err := os.WriteFile(b.recordFile(c), bytes.Replace(data, []byte("sha256:"), []byte("sha256:0"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(b.specFile(c)); err != nil {
		t.Fatal(err)
	}
	b.restart().offers(gpu("a", 1))
	mustRefuse(t, b, claim("other", "a"), "in use by claim with UID uid-c")
	b.boot = "boot-2"
	b.restart().offers(gpu("a", 1))
	mustPrepare(t, b, claim("other", "a"))
}

func TestUnknownFieldsAreKept(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1), gpu("b", 2))
	c := claim("c", "a", "b")
	mustPrepare(t, b, c)
	data, _ := os.ReadFile(b.recordFile(c))
	data = reseal(data, `"version"`, `"later": {"x": [1]}, "version"`)
	data = reseal(data, `"device": "b"`, `"device": "b", "partition": "q"`)
	if err := os.WriteFile(b.recordFile(c), data, 0o600); err != nil {
		t.Fatal(err)
	}
	b.boot = "boot-2" // the record is rewritten
	b.restart().offers(gpu("a", 1), gpu("b", 2))
	mustPrepare(t, b, c)
	data, _ = os.ReadFile(b.recordFile(c))
	_, body, _ := bytes.Cut(data, []byte("\n"))
	var got struct {
		Boot    string
		Later   map[string][]int
		Results []struct{ Device, Partition string }
	}
	if err := json.Unmarshal(body, &got); err != nil {
		t.Fatal(err)
	}
	if got.Boot != "boot-2" || len(got.Later["x"]) != 1 || got.Results[0].Partition != "" || got.Results[1].Partition != "q" {
		t.Errorf("rewritten as %s", body)
	}
}

// checksum returns the first line of a claim's file.
func checksum(body []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(body)) }

// The time of an allocation remains the same in later boots, and changes with a new allocation.
// Other programs can read the time from the files.
func TestRecordsSaySinceWhen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t).restart().offers(gpu("a", 1), gpu("b", 2))
		since := func(c *resourceapi.ResourceClaim) time.Time {
			t.Helper()
			data, err := os.ReadFile(b.recordFile(c))
			if err != nil {
				t.Fatal(err)
			}
			r, err := allocation.DecodeClaim(data)
			if err != nil {
				t.Fatal(err)
			}
			dir := filepath.Dir(filepath.Dir(b.recordFile(c)))
			if read := allocation.ReadSince(os.DirFS(dir), ".", c.UID); !read.Equal(r.Since) {
				t.Errorf("the record says %s, and is read as %s", r.Since, read)
			}
			return r.Since
		}
		began := time.Now()
		mustPrepare(t, b, claim("c", "a"))
		time.Sleep(time.Hour)
		b.boot = "boot-2"
		b.restart().offers(gpu("a", 1), gpu("b", 2))
		mustPrepare(t, b, claim("c", "a"))
		if got := since(claim("c", "a")); !got.Equal(began) {
			t.Errorf("after a reboot it has its device since %s, and was given it at %s", got, began)
		}
		mustUnprepare(t, b, claim("c", "a"))
		mustPrepare(t, b, claim("c", "b"))
		if got := since(claim("c", "b")); !got.Equal(began.Add(time.Hour)) {
			t.Errorf("it has another device since %s", got)
		}
	})
}
