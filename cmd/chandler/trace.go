package main

import (
	"context"
	"fmt"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/internal/traces"
)

// trace has the agent make traces, if the environment names a collector. The function that
// it returns sends the last of them.
func trace(ctx context.Context, config *agent.Config) (stop func(), err error) {
	tracer, stop, err := traces.Start(ctx, config.NodeName, config.Version)
	if err != nil {
		return nil, fmt.Errorf("traces: %w", err)
	}
	config.Tracer = tracer
	return stop, nil
}
