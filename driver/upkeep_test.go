package driver

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
)

// A claim's programs are started before any container can have the claim, and are ordered again in
// each call. While they cannot start, the claim is refused. Only exclusive allocations may have
// such programs.
func TestOrders(t *testing.T) {
	b := newBench(t)
	b.config.ReadParameters = func([]byte) (discovery.Parameters, error) { return discovery.Parameters{"daemon": "true"}, nil }
	b.config.OrderDaemons = func(given []discovery.Device, parameters discovery.Parameters) []discovery.Order {
		if parameters["daemon"] == "" {
			return nil
		}
		return []discovery.Order{{Family: "maker", How: map[string]string{"devices": given[0].Name}}}
	}
	var ordered []string
	answer := errors.New("it does not start")
	specs := func() int {
		found, _ := filepath.Glob(filepath.Join(b.config.CDI.Path, "*"))
		return len(found)
	}
	b.config.StartDaemons = func(_ context.Context, uid types.UID, orders []discovery.Order) error {
		ordered = append(ordered, orders[0].How["devices"])
		if len(ordered) == 1 && specs() > 0 {
			t.Error("there is a CDI spec already")
		}
		if _, err := os.Stat(filepath.Join(b.records(), string(uid)+".record")); err != nil {
			t.Error("the claim does not hold its devices yet: ", err)
		}
		return answer
	}
	b.restart().offers(byMemory("big", 8), gpu("card", 1), gpu("other", 2))
	wanted := asking(claim("wanted", "card"), "{}")
	if _, err := b.try(wanted); err == nil || !strings.Contains(err.Error(), "it does not start") || RefusalOf(err) != RefusedConfiguring {
		t.Errorf("%v, %s", err, RefusalOf(err))
	}
	answer = nil
	for range 2 {
		if _, err := b.try(wanted); err != nil {
			t.Error(err)
		}
	}
	if got := strings.Join(ordered, " "); got != "card card card" || specs() != 1 {
		t.Errorf("ordered %q, %d specs", got, specs())
	}
	if _, err := b.try(claim("plain", "other")); err != nil || len(ordered) != 3 {
		t.Errorf("%v, ordered %q", err, ordered)

	}
	shared := asking(taking(claim("shared", "big"), "memory", "3Gi"), "{}")
	if _, err := b.try(shared); err == nil || !strings.Contains(err.Error(), "request r: parameters: it has devices that are not the claim's alone") || RefusalOf(err) != RefusedParameters {
		t.Errorf("%v, %s", err, RefusalOf(err))
	}
}
