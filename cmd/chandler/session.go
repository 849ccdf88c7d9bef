package main

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/internal/hostservice"
)

// sessionLock is a lock of the node whose holder is the only agent that the host service obeys.
// Without a session, a write for an earlier, killed agent could still be in progress.
type sessionLock struct {
	agent.Lock

	service *hostservice.Client
}

// sessionPatience is how long Acquire waits for the host service before it logs the wait.
const sessionPatience = 5 * time.Second

// Acquire implements [agent.Lock]. A missing host service has no write in progress, and the session
// begins with the first write.
func (l sessionLock) Acquire(ctx context.Context) (release func(), err error) {
	release, err = l.Lock.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	logger := klog.FromContext(ctx)
	waits := time.AfterFunc(sessionPatience, func() {
		logger.Info("Waiting for the host service, which may still write for an earlier agent")
	})
	err = l.service.BeginSession(ctx)
	waits.Stop()
	if ctx.Err() != nil {
		release()
		return nil, ctx.Err()
	}
	if err != nil {
		logger.Info("Warning: devices that need the host service wait for it", "reason", err.Error())
	}
	return release, nil
}
