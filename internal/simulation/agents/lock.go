package agents

import (
	"context"
	"sync"
	"time"
)

// Lock is the node's lock, which one agent has at a time. If a process is killed during a write in
// the kernel, the process ends only after the write, and the kernel releases its locks then
// (do_exit in kernel/exit.c, Linux 6.1 to 6.18).
type Lock struct {
	mu      sync.Mutex
	holder  *Agent
	waiting map[*Agent]bool
	writing map[*Agent]int // writes to the host in progress
	since   time.Time      // the time when the holder got the lock
}

// IsHeld reports whether a living agent has the lock.
func (l *Lock) IsHeld() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holder != nil && !l.holder.dead.Load()
}

// HeldSince returns the time since which an agent has had the lock, and the present time if no
// agent has the lock.
func (l *Lock) HeldSince() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holder == nil {
		return time.Now()
	}
	return l.since
}

// Holder returns the agent that has the lock, nil if none, and the time since which it has the lock.
func (l *Lock) Holder() (*Agent, time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holder, l.since
}

// HasListing reports whether PodResources has listed the pods to the agent that has the lock.
func (l *Lock) HasListing() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holder != nil && l.holder.process.HasListing()
}

func (l *Lock) dropLock(a *Agent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.release(a)
}

func (l *Lock) release(a *Agent) {
	delete(l.waiting, a)
	if l.holder == a {
		l.holder = nil
	}
}

// releaseDead releases the lock of an agent whose process ends, unless a write is in progress.
func (l *Lock) releaseDead(a *Agent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.waiting, a)
	if l.writing[a] == 0 {
		l.release(a)
	}
}

// beginWrite records the beginning of a write by an agent, and reports whether the agent has the
// lock.
func (l *Lock) beginWrite(a *Agent) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.writing[a]++
	return l.holder == a
}

// endWrite records the end of a write by an agent.
func (l *Lock) endWrite(a *Agent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.writing[a]--; l.writing[a] == 0 && a.dead.Load() {
		l.release(a)
	}
}

// isWriting reports whether a write of an agent is in progress.
func (l *Lock) isWriting(a *Agent) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.writing[a] > 0
}

// DropAll takes the lock from all agents, as a reboot does.
func (l *Lock) DropAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holder, l.waiting = nil, make(map[*Agent]bool)
}

// lockPause is the interval between attempts to get the lock, as for the real lock.
const lockPause = 50 * time.Millisecond

// lockOf is the lock from the view of one agent.
type lockOf struct {
	*Lock
	own *Agent
}

// Acquire implements [agent.Lock].
func (l lockOf) Acquire(ctx context.Context) (func(), error) {
	for {
		l.mu.Lock()
		if l.holder == nil && !l.own.dead.Load() {
			l.holder, l.since = l.own, time.Now()
			delete(l.waiting, l.own)
			l.mu.Unlock()
			l.own.node.History.Log("%s is the active agent", l.own.Name)
			l.own.node.Watcher.LockAcquired()
			return l.unlock, nil
		}
		l.waiting[l.own] = true
		l.mu.Unlock()
		select {
		case <-ctx.Done():
			l.dropLock(l.own)
			return nil, ctx.Err()
		case <-time.After(lockPause):
		}
	}
}

// unlock releases the lock. The agent must not write to the host afterwards, since the next agent
// begins.
func (l lockOf) unlock() {
	if l.isWriting(l.own) {
		l.own.node.History.Fail("%s releases the node's lock while a write of it goes on", l.own.Name)
	}
	l.dropLock(l.own)
}

// Awaited implements [agent.Lock].
func (l lockOf) Awaited() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.waiting) > 0
}
