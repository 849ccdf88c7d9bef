package main

import (
	"context"
	"fmt"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/internal/traces"
)

// trace enables the agent's traces if environment variables name a collector. The function stop
// sends the remaining traces.
func trace(ctx context.Context, config *agent.Config) (stop func(), err error) {
	tracer, stop, err := traces.Start(ctx, config.NodeName, config.Version)
	if err != nil {
		return nil, fmt.Errorf("traces: %w", err)
	}
	config.Tracer = tracer
	return stop, nil
}
