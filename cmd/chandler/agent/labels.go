package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/discovery/labels"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/disk"
)

// labelInterval is how often the agent looks whether the feature file says what it should.
// Node Feature Discovery reads it once a minute by default.
const labelInterval = 5 * time.Second

// labelNode keeps the feature file until the context ends. The file stays when the agent
// ends: the node has the same devices when the next one begins.
func (a *agent) labelNode(ctx context.Context) {
	if a.FeatureDir == "" {
		return
	}
	f := &featureFile{files: a.files(), dir: a.FeatureDir, families: a.Families}
	f.sweep(ctx)
	for ; ctx.Err() == nil; waitFor(ctx, nil, labelInterval) {
		if p := a.placed.Load(); p != nil {
			f.keep(ctx, p.snapshot)
		}
	}
}

// featureFile is the file in which Node Feature Discovery finds the labels of the node.
type featureFile struct {
	files    disk.Files
	dir      string
	families []*discovery.Family

	of    *rules.Snapshot // of which text is
	known bool            // text is known
	text  []byte          // nil if the node has no labels
	err   error           // what of that is no label, or why text is of an earlier snapshot
	said  string          // the error that was logged last, "" if all was well since
}

// featureName is the name of the file.
const featureName = "chandler"

// errNoFeatureDir says that nobody reads feature files, or none of this agent's.
var errNoFeatureDir = errors.New("there is no such directory")

// keep makes the file say what the devices of a snapshot give the node. An error is logged
// once, and the file is tried again at the next call.
func (f *featureFile) keep(ctx context.Context, s *rules.Snapshot) {
	if s != f.of {
		f.of = s
		f.take(s)
	}
	err := f.err
	if f.known {
		err = errors.Join(f.err, f.write())
	}
	switch {
	case err == nil:
		f.said = ""
	case err.Error() == f.said:
	case errors.Is(err, errNoFeatureDir):
		klog.FromContext(ctx).V(2).Info("No labels are written for Node Feature Discovery", "reason", err)
		f.said = err.Error()
	default:
		klog.FromContext(ctx).Error(err, "Labels of the node for Node Feature Discovery; trying again", "interval", labelInterval)
		f.said = err.Error()
	}
}

// take makes the text of a snapshot. A file that Node Feature Discovery would not take is not
// written, and the one before stays.
func (f *featureFile) take(s *rules.Snapshot) {
	made, err := labels.Of(s, f.families)
	text, fileErr := labels.File(made)
	f.err = errors.Join(err, fileErr)
	if fileErr != nil {
		return
	}
	f.known, f.text = true, nil
	if len(made) > 0 {
		f.text = text
	}
}

// write makes the file what it should be, unless it is. Nobody would read it in a directory
// that is made for it.
func (f *featureFile) write() error {
	if _, err := f.files.Stat(f.dir); f.text != nil && errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w", f.dir, errNoFeatureDir)
	}
	if err := f.files.Keep(filepath.Join(f.dir, featureName), f.text, 0o644); err != nil {
		return fmt.Errorf("keep feature file: %w", err)
	}
	return nil
}

// sweep removes what killed agents left. It is hidden, so Node Feature Discovery ignores it.
func (f *featureFile) sweep(ctx context.Context) {
	if err := f.files.Sweep(f.dir, disk.Abandoned, featureName); err != nil {
		klog.FromContext(ctx).Error(err, "Temporary files beside the labels of the node")
	}
}
