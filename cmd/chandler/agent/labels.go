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

// labelInterval is how often the agent compares the feature file with the labels. Node Feature
// Discovery reads the file once a minute by default.
const labelInterval = 5 * time.Second

// labelNode maintains the feature file until the context ends. The file remains when the agent
// ends, because the node has the same devices when the next agent starts.
func (a *agent) labelNode(ctx context.Context) {
	if a.FeatureDir == "" {
		return
	}
	f := &featureFile{files: a.files(), dir: a.FeatureDir, families: a.Families}
	f.removeTemporary(ctx)
	none := &rules.Snapshot{}
	for ; ctx.Err() == nil; waitFor(ctx, nil, labelInterval) {
		switch p := a.placedDevices.Load(); {
		case p == nil:
		case a.settings.inForce().Rules.ReportOnly:
			f.writeLabels(ctx, none) // pods that select such nodes would get no device
		default:
			f.writeLabels(ctx, p.Snapshot)
		}
	}
}

// featureFile maintains the file with the labels of the node for Node Feature Discovery.
type featureFile struct {
	files    disk.Files
	dir      string
	families []*discovery.Family

	snapshot  *rules.Snapshot // snapshot that take was called with last
	known     bool            // whether text was computed
	text      []byte          // content of the file, nil if the node has no labels
	err       error           // values that are invalid in labels, or why text is from an earlier snapshot
	lastError string          // error that was logged last, "" after a success
}

// featureName is the name of the feature file.
const featureName = "chandler"

// errNoFeatureDir means that Node Feature Discovery does not run here, or reads another directory.
var errNoFeatureDir = errors.New("there is no such directory")

// writeLabels writes the labels of the snapshot to the file. It logs an error once, and the next
// call tries again.
func (f *featureFile) writeLabels(ctx context.Context, s *rules.Snapshot) {
	if s != f.snapshot {
		f.snapshot = s
		f.computeText(s)
	}
	err := f.err
	if f.known {
		err = errors.Join(f.err, f.write())
	}
	switch {
	case err == nil:
		f.lastError = ""
	case err.Error() == f.lastError:
	case errors.Is(err, errNoFeatureDir):
		klog.FromContext(ctx).V(2).Info("No labels are written for Node Feature Discovery", "reason", err)
		f.lastError = err.Error()
	default:
		klog.FromContext(ctx).Error(err, "Labels of the node for Node Feature Discovery; trying again", "interval", labelInterval)
		f.lastError = err.Error()
	}
}

// computeText computes the text for a snapshot. If Node Feature Discovery would refuse the file,
// the previous text remains.
func (f *featureFile) computeText(s *rules.Snapshot) {
	made, err := labels.NodeLabels(s, f.families)
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

// write writes the text to the file unless the file has this content. It does not create the
// directory, which would have no reader.
func (f *featureFile) write() error {
	if _, err := f.files.Stat(f.dir); f.text != nil && errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w", f.dir, errNoFeatureDir)
	}
	if err := f.files.UpdateFile(filepath.Join(f.dir, featureName), f.text, 0o644); err != nil {
		return fmt.Errorf("keep feature file: %w", err)
	}
	return nil
}

// removeTemporary removes temporary files of agents that were killed. Their names begin with a dot,
// so Node Feature Discovery ignores such files.
func (f *featureFile) removeTemporary(ctx context.Context) {
	if err := f.files.SweepTemporary(f.dir, disk.Abandoned, featureName); err != nil {
		klog.FromContext(ctx).Error(err, "Temporary files beside the labels of the node")
	}
}
