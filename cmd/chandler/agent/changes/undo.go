package changes

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/internal/ledger"
)

// RetryInterval is the time until the next attempt after the undo of a change has failed. After the
// same time the agent also checks again for consumers, in case no release was reported.
const RetryInterval = 10 * time.Second

// undoLoop undoes changes of devices once the changed devices have no consumer: it returns functions
// under vfio to their drivers, or removes devices that were created on demand.
type undoLoop struct {
	// records are those of the changes: those of package passthrough or ondemand.
	records interface {
		Open() (problems []error)
		ReadAgain() (problems []error, unread bool)
		RestoreRecords() error
	}
	recovering string // log message for records that cannot be read
	changed    string // what the records describe, for the log message about records that cannot be written
	failing    string // log message for an undo that fails

	ledger *ledger.Ledger
	due    chan struct{} // has a value when a change may be due for its undo

	// list returns the changes with a record.
	list func() []undoable
}

// undoable is the change of one unit: of the functions or devices that change together.
type undoable struct {
	unit string

	// stays returns the time until the next check whether the change may be undone, 0 if it may be
	// undone now.
	stays func() time.Duration

	// undo undoes the change, unless a consumer has a device of the unit.
	undo func(context.Context) error
}

// open loads the records of an earlier agent.
func (l *undoLoop) open(ctx context.Context) {
	l.logProblems(ctx, l.records.Open())
	l.checkSoon()
}

// checkSoon makes run check which changes may be undone.
func (l *undoLoop) checkSoon() {
	select {
	case l.due <- struct{}{}:
	default:
	}
}

// run undoes changes until the context ends.
func (l *undoLoop) run(ctx context.Context) {
	attempts := newAttempts(l.failing)
	unwritten := false
	for {
		freed := l.ledger.FreedSignal()
		problems, unread := l.records.ReadAgain()
		l.logProblems(ctx, problems)
		unwritten = l.restoreRecords(ctx, unwritten)
		all, waiting, pause := l.list(), make(map[string]bool), RetryInterval
		for _, change := range all {
			if left := change.stays(); left > 0 {
				pause = min(pause, left)
			} else if waiting[change.unit] = true; attempts.isDue(change.unit) {
				attempts.recordResult(ctx, change.unit, change.undo(ctx))
			}
		}
		var again <-chan time.Time
		if len(all) > 0 || unread {
			again = time.After(min(pause, attempts.pause(waiting)))
		} else {
			freed = nil
		}
		select {
		case <-ctx.Done():
			return
		case <-l.due:
		case <-freed:
		case <-again:
		}
	}
}

// logProblems logs why records of an earlier agent cannot be read.
func (l *undoLoop) logProblems(ctx context.Context, problems []error) {
	for _, problem := range problems {
		klog.FromContext(ctx).Error(problem, l.recovering)
	}
}

// restoreRecords rewrites records that another program has removed. It logs a failure once, since
// the errors contain varying names of temporary files.
func (l *undoLoop) restoreRecords(ctx context.Context, failing bool) (fails bool) {
	err := l.records.RestoreRecords()
	if err != nil && !failing {
		klog.FromContext(ctx).Error(err, "Records could not be written; trying again", "of", l.changed, "interval", RetryInterval)
	}
	return err != nil
}
