package driver

import (
	"context"
	"fmt"
	"slices"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/traces"
)

// claimOrders returns the orders for programs that must run for a claim. They require devices with
// an exclusive allocation.
func (h *claimHandler) claimOrders(results []allocation.Result, devices []rules.Offered, parameters map[string]discovery.Parameters) ([]discovery.Order, error) {
	if h.config.OrderDaemons == nil {
		return nil, nil
	}
	var all [][]discovery.Order
	var seen []string
	for _, result := range results {
		request := result.Request
		if slices.Contains(seen, request) || len(parameters[request]) == 0 {
			continue
		}
		seen = append(seen, request)
		var given []discovery.Device
		alone := true
		for i := range results {
			if r := &results[i]; r.Request == request {
				given = append(given, devices[i].Device)
				alone = alone && !r.Admin && !r.Shared && r.Consumes == nil
			}
		}
		orders := h.config.OrderDaemons(given, parameters[request])
		if len(orders) > 0 && !alone {
			return nil, fmt.Errorf("request %s: parameters: it has devices that are not the claim's alone", request)
		}
		all = append(all, orders)
	}
	orders, err := discovery.JoinOrders(all...)
	if err != nil {
		return nil, fmt.Errorf("parameters: %w", err)
	}
	return orders, nil
}

// startDaemons starts the programs of a claim, and returns when they are ready. The claim already
// has its devices, and keeps them after a failure. Programs that were started end with the claim.
func (h *claimHandler) startDaemons(ctx context.Context, p *plan) error {
	if len(p.orders) == 0 {
		return nil
	}
	err := traces.Do(ctx, "request sharing daemons", func() error { return h.config.StartDaemons(ctx, p.wanted.UID, p.orders) })
	return withRefusal(RefusedConfiguring, err)
}
