package list

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
)

// A list that is too long for the kubelet is shortened, and the omitted units are reported as
// problems.
func TestListThatIsTooLong(t *testing.T) {
	const shares = 4096
	s := &rules.Snapshot{}
	for g := range 16 {
		offer := discovery.Offer{Resource: "example.com/share"}
		for n := range shares {
			offer.IDs = append(offer.IDs, fmt.Sprintf("GPU-0b8d0f4c-6d5a-4e55-9f0e-0123456789%02d::%d", g, n))
		}
		s.Devices = append(s.Devices, rules.Offered{Device: discovery.Device{Name: fmt.Sprint("gpu-", g)}, Offers: []discovery.Offer{offer}})
	}
	o := BuildOffers(s)
	l := (*List)(nil).next("example.com/share", o, nil, Input{Snapshot: s, View: ledger.ViewOf(StockOf(rules.PlainDevices(s.Devices), Lists{}))})
	size := proto.Size(&pluginapi.ListAndWatchResponse{Devices: l.Devices()})
	units := len(o.Units["example.com/share"])
	if units < 10 || units == 16 || size > rules.MaxList {
		t.Errorf("%d units, a list of %d bytes", units, size)
	}
	if len(o.Problems) != 1 || !strings.Contains(o.Problems[0].Error(), "65536 IDs") || o.Problems[0].Device != fmt.Sprint("gpu-", units) {
		t.Errorf("problems: %v", o.Problems)
	}
	s.Devices = s.Devices[:units]
	if o := BuildOffers(s); len(o.Problems) > 0 || len(o.Units["example.com/share"]) != units {
		t.Errorf("what fits is cut: %v", o.Problems)
	}
}
