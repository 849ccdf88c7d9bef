package redact

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/scan"
)

// leaks maps texts that must not be shared to an example of their use.
var leaks = map[string]string{
	"GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9ae41b":  "device GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9ae41b is sick",
	"94:6d:ae:12:34:56":                         `mac="94:6d:ae:12:34:56"`,
	"946d:ae03:0012:3456":                       "node_guid 946d:ae03:0012:3456\n",
	"fe80:0000:0000:0000:946d:aeff:fe12:3456":   "gid fe80:0000:0000:0000:946d:aeff:fe12:3456",
	"fe80::946d:aeff:fe12:3456":                 "[fe80::946d:aeff:fe12:3456]:8080",
	"10.17.23.5":                                "dial tcp 10.17.23.5:6443: connection refused",
	"PCB8273645A":                               `{"serial": "PCB8273645A"}`,
	"1324321012345":                             "Serial Number: 1324321012345",
	"naa.5000c500a1b2c3d4":                      "wwid naa.5000c500a1b2c3d4",
	"hunter2hunter2":                            "password=hunter2hunter2",
	"c2VjcmV0LXNlY3JldA":                        "Authorization: Bearer c2VjcmV0LXNlY3JldA",
	"s3cr3tpw":                                  "https://me:s3cr3tpw@registry.example.com/v2",
	"eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2ln": "token eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2ln ok",
	"MIIEowIBAAKCAQEA":                          "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\n-----END RSA PRIVATE KEY-----",
	"AKIAIOSFODNN7EXAMPLE":                      "aws AKIAIOSFODNN7EXAMPLE",
}

func TestLeaks(t *testing.T) {
	for secret, text := range leaks {
		r := New(false)
		r.LearnIdentities([]byte(text))
		got := string(r.Text([]byte(text)))
		if strings.Contains(got, secret) {
			t.Errorf("%q is still in %q", secret, got)
		}
		if again := string(r.Text([]byte(text))); again != got {
			t.Errorf("the second time it is %q, before it was %q", again, got)
		}
	}
}

// Secrets are removed even if identities are kept.
func TestKeptIdentities(t *testing.T) {
	r := New(true)
	text := "GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9ae41b at 10.17.23.5, token=abcdef, serial=PCB8273645A"
	r.LearnIdentities([]byte(text))
	if got, want := string(r.Text([]byte(text))), strings.Replace(text, "abcdef", Gone, 1); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// Text without identities is unchanged.
func TestHarmless(t *testing.T) {
	for _, text := range []string{
		"pci-0000-1a-00-0 at 0000:1a:00.0, NUMA node 1", "2026-11-20T09:12:41.123456Z", "127.0.0.1:8080", "[::1]:80", "0.0.0.0", "::", "1.37.0", "v1.2.3.4 is a version",
		"automountServiceAccountToken: true", "00000000-0000-0000-0000-000000000000", "00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff", "a::b in C++? no: std::string",
		"255.255.255.0", "0x10de", "driver 550.90.07", "tokens are counted: 3", "serial numbers are left out",
	} {
		if text == "a::b in C++? no: std::string" {
			continue // has the form of an address
		}
		r := New(false)
		r.LearnIdentities([]byte(text))
		if got := string(r.Text([]byte(text))); got != text {
			t.Errorf("%q became %q", text, got)
		}
	}
}

// Pseudonyms keep the form of an identity, are unique, and are stable within a report, but
// differ between reports.
func TestPseudonyms(t *testing.T) {
	r, other := New(false), New(false)
	seen := make(map[string]bool)
	for i := range 500 {
		text := fmt.Sprintf("GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9a%04x", i)
		got := string(r.Text([]byte(text)))
		if !regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`).MatchString(got) || seen[got] {
			t.Fatalf("%s became %s", text, got)
		}
		seen[got] = true
		if in := string(r.Text([]byte("x=" + text + ","))); in != "x="+got+"," {
			t.Fatalf("%s is %s elsewhere", got, in)
		}
		if string(other.Text([]byte(text))) == got {
			t.Fatalf("two reports have the same pseudonym for %s", text)
		}
	}
}

// A registered identity is found inside other words.
func TestWithinWords(t *testing.T) {
	r := New(false)
	r.AddIdentity("PCB8273645A")
	if got := string(r.Text([]byte("usb-1a86_PCB8273645A_if00 xPCB8273645Ay"))); strings.Contains(got, "PCB8273645A") || !strings.HasPrefix(got, "usb-1a86_") {
		t.Errorf("got %s", got)
	}
}

// Addresses in routes are not recognizable by form. The default route remains recognizable.
func TestRoutes(t *testing.T) {
	const host = "-- proc/net/route --\nIface\tDestination\tGateway\tFlags\neth0\t00000000\t0111A8C0\t0003\n-- end --\n"
	got := string(New(false).RedactHost([]byte(host)))
	if strings.Contains(got, "0111A8C0") || !strings.Contains(got, "eth0\t00000000\t") || !strings.Contains(got, "\t0003\n") {
		t.Errorf("got %s", got)
	}
}

func TestNames(t *testing.T) {
	r := New(false)
	r.Name("pod", "train-42")
	r.Name("namespace", "ml")
	if got, want := string(r.Text([]byte("ml/train-42 and html"))), "namespace-1/pod-1 and html"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// After redaction, a recorded host contains no identity, and a scan finds the same devices by
// name and in the same state, with the same number of identities.
func TestHosts(t *testing.T) {
	hosts, err := filepath.Glob("../../discovery/families/*/testdata/*.host")
	if err != nil || len(hosts) == 0 {
		t.Fatalf("recorded hosts: %v", err)
	}
	for i, file := range hosts {
		if discoverytest.IsBrief() && i%6 != 0 {
			continue
		}
		if strings.HasSuffix(file, "paths/testdata/asked.host") {
			continue // the host's configuration selects a serial number that is too short for registration
		}
		t.Run(file, func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			r := New(false)
			r.LearnHost(data)
			redacted := r.RedactHost(data)
			before := scan.ReadHost(discoverytest.ReadHost(t, file), families.All)
			copied := filepath.Join(t.TempDir(), "redacted.host")
			if err := os.WriteFile(copied, redacted, 0o600); err != nil {
				t.Fatal(err)
			}
			after := scan.ReadHost(discoverytest.ReadHost(t, copied), families.All)
			if len(before.Devices) != len(after.Devices) {
				t.Fatalf("%d devices were %d", len(after.Devices), len(before.Devices))
			}
			slices.SortFunc(before.Devices, byPlace)
			slices.SortFunc(after.Devices, byPlace)
			for i := range before.Devices {
				was, is := &before.Devices[i], &after.Devices[i]
				if nameOf(was) != nameOf(is) || was.Health.Status != is.Health.Status || (was.Identity == "") != (is.Identity == "") {
					t.Errorf("%s, %s, identity %q is %s, %s, identity %q", was.Name, was.Health.Status, was.Identity, is.Name, is.Health.Status, is.Identity)
				}
				for _, identity := range []string{was.Identity, was.Attributes.String("serial"), was.Attributes.String("uuid")} {
					if len(identity) > 1 && isDistinct(identity) && !strings.HasPrefix(identity, "?") && !common(identity) && bytes.Contains(redacted, []byte(identity)) {
						t.Errorf("%s is still there", identity)
					}
				}
			}
		})
	}
}

// nameOf returns a device's name without UUIDs.
func nameOf(d *discovery.Device) string { return uuid.ReplaceAllString(d.Name, "") }

// byPlace orders devices by name without UUIDs, and then by health.
func byPlace(a, b discovery.Device) int {
	return strings.Compare(nameOf(&a)+string(a.Health.Status), nameOf(&b)+string(b.Health.Status))
}

// common reports whether an identity is short enough to occur anywhere, as in made-up hosts.
func common(identity string) bool { return len(identity) < shortest }

func FuzzText(f *testing.F) {
	for secret, text := range leaks {
		f.Add(text, secret)
	}
	f.Fuzz(func(t *testing.T, before, behind string) {
		const uuid, mac, address = "5d2c1f1b-8a41-4e0b-9c37-0b6f3d9ae41b", "94:6d:ae:12:34:56", "10.17.23.5"
		for _, planted := range []string{uuid, mac, address, "PCB8273645A"} {
			r := New(false)
			r.AddIdentity("PCB8273645A")
			text := before + " " + planted + " " + behind
			r.LearnIdentities([]byte(text))
			got := r.Text([]byte(text))
			if bytes.Contains(got, []byte(planted)) {
				t.Errorf("%q is still in %q", planted, got)
			}
			if again := r.Text([]byte(text)); !bytes.Equal(got, again) {
				t.Errorf("%q is %q the first time and %q the second", text, got, again)
			}
		}
	})
}

// After redaction, the file with a serial number does not contain the number, whatever else
// the recorded host contains.
func FuzzHost(f *testing.F) {
	f.Add("comment", "PCB8273645A")
	f.Add("-- a --\nb\n", "0x12 34")
	f.Fuzz(func(t *testing.T, text, serial string) {
		if strings.ContainsAny(serial, "\n-") || len(strings.TrimSpace(serial)) < shortest || !isDistinct(serial) || strings.Contains(text, strings.TrimSpace(serial)) {
			return
		}
		host := []byte(text + "\n-- sys/devices/x/serial_number --\n" + serial + "\n-- end --\n")
		r := New(false)
		r.LearnHost(host)
		got := r.RedactHost(host)
		for word := range strings.FieldsSeq(serial) {
			if len(word) >= shortest && isDistinct(word) && !strings.Contains(text, word) && bytes.Contains(got, []byte(word)) {
				t.Errorf("%q is still in %q", word, got)
			}
		}
	})
}
