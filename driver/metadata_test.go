package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	metadataapi "k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/driver/outputs"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/ledger/allocation"
)

// prepareCall prepares a claim through the library, and returns the CDI devices of each device in
// the answer.
func prepareCall(t *testing.T, conn *grpc.ClientConn, c *resourceapi.ResourceClaim) (ids [][]string) {
	t.Helper()
	response, err := drapb.NewDRAPluginClient(conn).NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{
		Claims: []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}})
	if err != nil {
		t.Fatal(err)
	}
	answer := response.Claims[string(c.UID)]
	if answer.GetError() != "" {
		t.Fatalf("prepare %s: %s", c.UID, answer.GetError())
	}
	for _, device := range answer.Devices {
		ids = append(ids, device.CdiDeviceIds)
	}
	return ids
}

func unprepareCall(t *testing.T, conn *grpc.ClientConn, c *resourceapi.ResourceClaim) {
	t.Helper()
	response, err := drapb.NewDRAPluginClient(conn).NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{
		Claims: []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}})
	if err != nil || response.Claims[string(c.UID)].GetError() != "" {
		t.Fatalf("unprepare %s: %v, %v", c.UID, err, response)
	}
}

// mounted returns the mount of a CDI device as a container runtime finds it: the path in the
// container and the file's content.
func (b *bench) mounted(id string) (path string, data []byte) {
	b.t.Helper()
	cache, err := cdiapi.NewCache(cdiapi.WithSpecDirs(b.config.CDI.Path), cdiapi.WithAutoRefresh(false))
	if err != nil {
		b.t.Fatal(err)
	}
	device := cache.GetDevice(id)
	if device == nil || len(device.ContainerEdits.Mounts) != 1 {
		b.t.Fatalf("CDI device %s: %v, %v", id, device, cache.GetErrors())
	}
	mount := device.ContainerEdits.Mounts[0]
	if data, err = os.ReadFile(mount.HostPath); err != nil {
		b.t.Fatal(err)
	}
	return mount.ContainerPath, data
}

// metadataFiles returns the metadata files of all claims.
func (b *bench) metadataFiles() []string {
	b.t.Helper()
	specs, err := filepath.Glob(filepath.Join(b.config.CDI.Path, "*metadata*"))
	if err != nil {
		b.t.Fatal(err)
	}
	dirs, err := filepath.Glob(filepath.Join(b.config.KubeletRoot, "plugins/chandler.dev/*metadata/*"))
	if err != nil {
		b.t.Fatal(err)
	}
	for _, names := range [][]string{specs, dirs} {
		for i := range names {
			names[i] = filepath.Base(names[i])
		}
	}
	return append(specs, dirs...)
}

func (b *bench) expectMetadata(when string, want ...string) {
	b.t.Helper()
	if got := b.metadataFiles(); !slices.Equal(got, want) {
		b.t.Errorf("%s there is %q, want %q", when, got, want)
	}
}

func versionsOf(t *testing.T, data []byte) (versions []string) {
	t.Helper()
	for stream := json.NewDecoder(bytes.NewReader(data)); ; {
		var object struct{ APIVersion string }
		if err := stream.Decode(&object); errors.Is(err, io.EOF) {
			return versions
		} else if err != nil {
			t.Fatal(err)
		}
		versions = append(versions, object.APIVersion)
	}
}

// A container can read all published attributes of its devices and the name of its network
// interface. Unprepare removes all files, even without an API server.
func TestMetadata(t *testing.T) {
	c := claim("made-up-xyz12", "a", "vf", "b")
	c.Annotations = map[string]string{resourceapi.PodResourceClaimAnnotation: "mine"}
	c.Status.Allocation.Devices.Results[1].Request = "net/fast"
	b := newBench(t)
	b.has("enp1s0v0")
	b.config.Granter = func(given []discovery.Device, grant discovery.Grant) (edits specs.ContainerEdits) {
		if grant.Request == "net/fast" {
			edits.NetDevices = []*specs.LinuxNetDevice{{HostInterfaceName: "enp1s0v0", Name: "net1"}}
		}
		return edits
	}
	client := fake.NewClientset(c)
	var silent atomic.Bool
	client.PrependReactor("*", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
		return silent.Load(), nil, errors.New("silence")
	})
	_, conn, stop := b.serve(client)
	a, vf := gpu("a", 1), gpu("vf", 2)
	a.Attributes.SetString("model", "One")
	a.Attributes.SetInt("linkWidth", 16)
	b.offers(a, gpu("b", 3), vf)

	ids := prepareCall(t, conn, c)
	const gpus, net = "chandler.dev/metadata=uid-made-up-xyz12_r", "chandler.dev/metadata=uid-made-up-xyz12_net"
	want := [][]string{{"chandler.dev/claim=uid-made-up-xyz12-0-a", gpus}, {"chandler.dev/claim=uid-made-up-xyz12-1-vf", net}, {"chandler.dev/claim=uid-made-up-xyz12-2-b"}}
	if diff := cmp.Diff(want, ids); diff != "" {
		t.Errorf("CDI devices (-want +got):\n%s", diff)
	}
	path, data := b.mounted(gpus)
	if path != "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/mine/r/chandler.dev-metadata.json" {
		t.Errorf("mounted at %s", path)
	}
	if got := versionsOf(t, data); !slices.Equal(got, []string{"metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"}) {
		t.Errorf("versions %q", got)
	}
	devices := decodeMetadata(t, data, "r")
	if len(devices) != 2 || devices[0].Name != "a" || devices[1].Name != "b" || devices[0].Driver != "chandler.dev" || devices[0].Pool != "node" {
		t.Fatalf("devices: %+v", devices)
	}
	if diff := cmp.Diff(a.Attributes.ForSlice(), devices[0].Attributes); diff != "" {
		t.Errorf("attributes (-published +read):\n%s", diff)
	}
	if devices[0].NetworkData != nil {
		t.Errorf("the GPU has %v", devices[0].NetworkData)
	}
	_, data = b.mounted(net)
	if network := decodeMetadata(t, data, "net/fast")[0].NetworkData; network == nil || network.InterfaceName != "net1" {
		t.Errorf("the function has %v", network)
	}

	there := []string{"chandler.dev_metadata_uid-made-up-xyz12_net.json", "chandler.dev_metadata_uid-made-up-xyz12_r.json", "uid-made-up-xyz12"}
	b.expectMetadata("prepared,", there...)
	stop()
	b.config.NoMetadata = true // existing files remain for their claims, and are removed with the claims
	_, conn, stop = b.serve(client)
	b.offers(a, gpu("b", 3), vf)
	b.expectMetadata("after a restart", there...)
	if got := prepareCall(t, conn, c)[0]; len(got) != 1 {
		t.Errorf("without metadata the CDI devices are %q", got)
	}
	silent.Store(true)
	unprepareCall(t, conn, c)
	b.expectMetadata("unprepared,")
	stop()
}

func decodeMetadata(t *testing.T, data []byte, request string) []metadataapi.Device {
	t.Helper()
	var decoded metadataapi.DeviceMetadata
	if err := devicemetadata.DecodeMetadataFromStream(json.NewDecoder(bytes.NewReader(data)), &decoded); err != nil {
		t.Fatal(err)
	}
	if len(decoded.Requests) != 1 || decoded.Requests[0].Name != request {
		t.Fatalf("requests: %+v", decoded.Requests)
	}
	return decoded.Requests[0].Devices
}

// Each device that is chosen for an allocation by a common name has its own attributes, by which
// containers distinguish them.
func TestMetadataOfChosenDevices(t *testing.T) {
	b, c := newBench(t), severalChannels("c", 2)
	_, conn, stop := b.serve(fake.NewClientset(c))
	defer stop()
	b.offers(channels(3)...)
	ids := prepareCall(t, conn, c)
	if len(ids) != 2 || len(ids[0]) != 2 {
		t.Fatalf("the CDI devices are %q", ids)
	}
	_, data := b.mounted(ids[0][1])
	devices := decodeMetadata(t, data, "r")
	if len(devices) != 2 {
		t.Fatalf("devices: %+v", devices)
	}
	for i, device := range devices {
		if number := device.Attributes["channel"].IntValue; device.Name != commonName || number == nil || *number != int64(i) {
			t.Errorf("device %d has the name %s and the attributes %v", i, device.Name, device.Attributes)
		}
	}
}

// Two claims of one name have separate files, which are removed with their claims.
func TestMetadataOfClaimsWithOneName(t *testing.T) {
	first, second := claim("c", "a"), claim("c", "b")
	second.UID = "uid-second"
	b := newBench(t)
	client := fake.NewClientset(first)
	_, conn, _ := b.serve(client)
	b.offers(gpu("a", 1), gpu("b", 2))
	prepareCall(t, conn, first)
	if err := client.Tracker().Update(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), second, second.Namespace); err != nil {
		t.Fatal(err)
	}
	prepareCall(t, conn, second)
	for uid, want := range map[string]string{"uid-c": "a", "uid-second": "b"} {
		_, data := b.mounted("chandler.dev/metadata=" + uid + "_r")
		if devices := decodeMetadata(t, data, "r"); devices[0].Name != want {
			t.Errorf("the file of %s is of %v", uid, devices)
		}
	}
	unprepareCall(t, conn, first)
	b.expectMetadata("of the second", "chandler.dev_metadata_uid-second_r.json", "uid-second")
	unprepareCall(t, conn, second)
	b.expectMetadata("of neither")
}

// A claim's name may be too long for a directory. Its containers find the file anyway, also after a
// restart, and Unprepare removes everything.
func TestMetadataOfALongName(t *testing.T) {
	c, beside := claim("c", "a"), claim("c", "b")
	c.Namespace, c.Name = strings.Repeat("n", 63), strings.Repeat("c", 252)+"1"
	beside.Namespace, beside.Name, beside.UID = c.Namespace, strings.Repeat("c", 252)+"2", "uid-beside"
	b := newBench(t)
	client := fake.NewClientset(c, beside)
	_, conn, stop := b.serve(client)
	b.offers(gpu("a", 1), gpu("b", 2))
	prepareCall(t, conn, beside)
	unprepareCall(t, conn, beside)
	prepareCall(t, conn, c)
	prepareCall(t, conn, beside)
	stop()
	_, conn, stop = b.serve(client)
	defer stop()
	b.offers(gpu("a", 1), gpu("b", 2))
	for uid, device := range map[string]string{"uid-c": "a", "uid-beside": "b"} {
		_, data := b.mounted("chandler.dev/metadata=" + uid + "_r")
		if devices := decodeMetadata(t, data, "r"); devices[0].Name != device {
			t.Errorf("claim %s reads of %v", uid, devices)
		}
	}
	unprepareCall(t, conn, beside)
	if left := b.metadataFiles(); len(left) != 2 {
		t.Errorf("of the other claim there is %q", left)
	}
	unprepareCall(t, conn, c)
	b.expectMetadata("unprepared,")
	if exists(b.recordFile(c)) || exists(b.specFile(c)) {
		t.Error("the claim is not unprepared")
	}
}

// The files of a claim with an unreadable record are found by the UID.
func TestMetadataOfAnUnreadableRecord(t *testing.T) {
	for name, heir := range map[string]bool{"alone": false, "heir": true} {
		t.Run(name, func(t *testing.T) {
			c, other, second := claim("c", "a"), claim("other", "b"), claim("c", "b")
			second.UID = "uid-second"
			b := newBench(t)
			client := fake.NewClientset(c, other)
			_, conn, stop := b.serve(client)
			b.offers(gpu("a", 1), gpu("b", 2))
			prepareCall(t, conn, c)
			stop()
			if err := os.WriteFile(b.recordFile(c), []byte("noise"), 0o600); err != nil {
				t.Fatal(err)
			}
			_, conn, stop = b.serve(client)
			defer stop()
			b.offers(gpu("a", 1), gpu("b", 2))
			want := []string{"chandler.dev_metadata_uid-other_r.json", "uid-other"}
			if heir {
				if err := client.Tracker().Update(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), second, second.Namespace); err != nil {
					t.Fatal(err)
				}
				prepareCall(t, conn, second)
				want = []string{"chandler.dev_metadata_uid-second_r.json", "uid-second"}
			} else {
				prepareCall(t, conn, other)
			}
			unprepareCall(t, conn, c)
			b.expectMetadata("unprepared,", want...)
		})
	}
}

// A claim whose end failed keeps its metadata, since the kubelet may start further pods without
// another call.
func TestMetadataOfAClaimThatDidNotEnd(t *testing.T) {
	c := claim("c", "a")
	b := newBench(t)
	client := fake.NewClientset(c)
	_, conn, stop := b.serve(client)
	b.offers(gpu("a", 1))
	prepareCall(t, conn, c)
	want := b.metadataFiles()
	b.disk.Before = func(op disktest.Op, name string) error {
		if op == disktest.Remove && name == b.recordFile(c) {
			return errFault
		}
		return nil
	}
	if err := b.tryUnprepare(c); !errors.Is(err, errFault) {
		t.Fatal(err)
	}
	stop()
	b.disk.Before = nil
	_, conn, stop = b.serve(client)
	defer stop()
	<-b.ledger.WaitOpen()
	b.offers(gpu("a", 1))
	b.expectMetadata("when it is given again,", want...)
	unprepareCall(t, conn, c)
	b.expectMetadata("unprepared,")
}

// A claim ends even if the files of an earlier agent cannot be listed. Otherwise it would stay
// prepared without its metadata, which is removed by then.
func TestEarlierMetadataCannotBeListed(t *testing.T) {
	c := claim("c", "a")
	b := newBench(t)
	_, conn, stop := b.serve(fake.NewClientset(c))
	defer stop()
	b.offers(gpu("a", 1))
	prepareCall(t, conn, c)
	b.disk.BeforeRead = func(name string) error {
		if name == b.metadata.EarlierDir {
			return errFault
		}
		return nil
	}
	if err := b.tryUnprepare(c); err != nil || b.PreparedClaims() > 0 {
		t.Error(err)
	}
	b.expectMetadata("unprepared,")
}

// A spec that cannot be read at the start is restored from its copy when it vanishes.
func TestMetadataSpecThatCannotBeRead(t *testing.T) {
	c := claim("c", "a")
	b := newBench(t)
	client := fake.NewClientset(c)
	_, conn, stop := b.serve(client)
	b.offers(gpu("a", 1))
	prepareCall(t, conn, c)
	stop()
	const name = "chandler.dev_metadata_uid-c_r.json"
	spec := filepath.Join(b.config.CDI.Path, name)
	b.disk.BeforeRead = func(name string) error {
		if name == spec {
			return errFault
		}
		return nil
	}
	b.serve(client)
	<-b.ledger.WaitOpen()
	b.disk.BeforeRead = nil
	if err := os.Remove(spec); err != nil {
		t.Fatal(err)
	}
	if err := b.ledger.ReconcileFiles(t.Context()); err != nil {
		t.Error(err)
	}
	b.expectMetadata("after the restart", name, "uid-c")
}

// Specs and files that vanish are written again. A running agent writes them from memory, a
// starting agent from the record and the copies of the specs. A failed write is repeated.
func TestWipedFiles(t *testing.T) {
	for name, restarted := range map[string]bool{"running": false, "restarted": true} {
		t.Run(name, func(t *testing.T) {
			c := claim("c", "a")
			b := newBench(t)
			client := fake.NewClientset(c)
			_, conn, stop := b.serve(client)
			b.offers(gpu("a", 1))
			prepareCall(t, conn, c)
			want := make(map[string]string)
			wipe := []string{b.config.CDI.Path}
			if !restarted {
				wipe = append(wipe, b.metadata.Dir)
			}
			for _, dir := range wipe {
				b.readAll(dir, want)
			}
			if restarted {
				stop()
			}
			for _, dir := range wipe {
				if err := os.RemoveAll(dir); err != nil {
					t.Fatal(err)
				}
			}
			failed := make(map[string]bool) // each file fails once
			b.disk.Before = func(op disktest.Op, name string) error {
				if _, wanted := want[name]; wanted && op == disktest.Create && !failed[name] {
					failed[name] = true
					return errFault
				}
				return nil
			}
			if restarted {
				b.serve(client)
				<-b.ledger.WaitOpen()
			}
			for range want {
				if err := b.ledger.ReconcileFiles(t.Context()); err == nil {
					break
				}
			}
			got := make(map[string]string)
			for _, dir := range wipe {
				b.readAll(dir, got)
			}
			if diff := cmp.Diff(want, got); diff != "" || len(failed) != len(want) {
				t.Errorf("%d of %d files failed at first; -before +after:\n%s", len(failed), len(want), diff)
			}
		})
	}
}

// readAll reads all files below a directory.
func (b *bench) readAll(dir string, files map[string]string) {
	b.t.Helper()
	err := filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		data, err := os.ReadFile(name)
		files[name] = string(data)
		return err
	})
	if err != nil {
		b.t.Fatal(err)
	}
}

// After a new allocation, a request without devices of this driver has no file.
func TestMetadataOfAClaimAllocatedAgain(t *testing.T) {
	c := claim("c", "a", "b")
	c.Status.Allocation.Devices.Results[0].Request = "first"
	b := newBench(t)
	client := fake.NewClientset(c)
	_, conn, _ := b.serve(client)
	b.offers(gpu("a", 1), gpu("b", 2))
	prepareCall(t, conn, c)
	b.expectMetadata("prepared,", "chandler.dev_metadata_uid-c_first.json", "chandler.dev_metadata_uid-c_r.json", "uid-c")
	c = c.DeepCopy()
	c.Status.Allocation.Devices.Results[0].Driver = "other.example.com"
	if err := client.Tracker().Update(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), c, c.Namespace); err != nil {
		t.Fatal(err)
	}
	prepareCall(t, conn, c)
	b.expectMetadata("prepared again,", "chandler.dev_metadata_uid-c_r.json", "uid-c")
	unprepareCall(t, conn, c)
	b.expectMetadata("unprepared,")
}

// If a claim is unprepared while other claims of the same call are still being prepared, no files
// are written for the claim, since nothing would remove them.
func TestMetadataOfAClaimThatHasEnded(t *testing.T) {
	quick, slow := claim("quick", "a"), claim("slow", "b")
	b := newBench(t)
	_, conn, _ := b.serve(fake.NewClientset(quick, slow))
	b.offers(gpu("a", 1), gpu("b", 2))
	unlock, err := b.ledger.Lock(t.Context(), string(slow.UID))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := drapb.NewDRAPluginClient(conn).NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{
			{Namespace: quick.Namespace, Name: quick.Name, Uid: string(quick.UID)}, {Namespace: slow.Namespace, Name: slow.Name, Uid: string(slow.UID)},
		}})
		ended <- err
	}()
	for !b.holds(quick.UID) {
		time.Sleep(time.Millisecond)
	}
	unprepareCall(t, conn, quick)
	unlock()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	b.expectMetadata("prepared,", "chandler.dev_metadata_uid-slow_r.json", "uid-slow")
}

// If the files cannot be written, claims are prepared without metadata.
func TestMetadataThatCannotBeWritten(t *testing.T) {
	c := claim("c", "a")
	b := newBench(t)
	dir := filepath.Join(b.config.KubeletRoot, "plugins/chandler.dev")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, metadataDir), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_, conn, _ := b.serve(fake.NewClientset(c))
	b.offers(gpu("a", 1))
	if ids := prepareCall(t, conn, c); len(ids[0]) != 1 || !exists(b.specFile(c)) {
		t.Errorf("prepared with %q", ids)
	}
	unprepareCall(t, conn, c)
	if exists(b.recordFile(c)) {
		t.Error("the claim is not unprepared")
	}
}

// The start removes files without a claim. Files of an earlier agent remain while a spec mounts
// them.
func TestMetadataIsSwept(t *testing.T) {
	b := newBench(t)
	b.restart().offers(gpu("a", 1), gpu("b", 2))
	held, damaged := claim("held", "a"), claim("damaged", "b")
	mustPrepare(t, b, held)
	write := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	spec := func(uid types.UID) string {
		return filepath.Join(b.metadata.SpecDir, outputs.MetadataSpecPrefix+string(uid)+"_r.json")
	}
	write(filepath.Join(b.metadata.EarlierDir, "default_held/r/metadata.json"), "{}")
	write(filepath.Join(b.metadata.EarlierDir, "default_lost/r/metadata.json"), "{}")
	write(spec(held.UID), filepath.Join(b.metadata.EarlierDir, "default_held/r/metadata.json"))
	write(spec("uid-lost"), filepath.Join(b.metadata.EarlierDir, "default_lost/r/metadata.json"))
	write(filepath.Join(b.metadata.SpecDir, "."+outputs.MetadataSpecPrefix+"x.json.1.tmp"), "")
	b.restart()
	b.expectMetadata("after a restart", "chandler.dev_metadata_uid-held_r.json", "default_held", "uid-held")

	mustPrepare(t, b.offers(gpu("a", 1), gpu("b", 2)), damaged)
	for _, uid := range []types.UID{damaged.UID, "uid-lost"} {
		write(spec(uid), b.metadata.File(string(uid), "r"))
		write(b.metadata.File(string(uid), "r"), "{}")
	}
	if err := os.WriteFile(b.recordFile(damaged), []byte("noise"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.restart()
	b.expectMetadata("beside a record that cannot be read", "chandler.dev_metadata_uid-damaged_r.json", "chandler.dev_metadata_uid-held_r.json",
		"default_held", "uid-damaged", "uid-held")

	// The sweep releases an abandoned claim without the library.
	b.config.Abandoned = func(context.Context, []allocation.Owner) ([]types.UID, error) { return []types.UID{held.UID}, nil }
	b.restart().unprepareAbandoned(t.Context(), map[types.UID]bool{held.UID: true})
	b.expectMetadata("after a sweep", "chandler.dev_metadata_uid-damaged_r.json", "uid-damaged")
	mustUnprepare(t, b, damaged)
	b.expectMetadata("when the damaged claim has ended")
}
