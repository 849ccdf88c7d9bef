package settings

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/klog/v2"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/compile"
)

// A File is the configuration file of a running agent, with the settings for the agent's node.
type File struct {
	Name      string // path of the file, "" for none
	Node      v1alpha1.Node
	NewLabels <-chan map[string]string // the labels of the node, after each change

	wasRead   bool   // the file was read before
	last      []byte // the last content
	readError string // the last read error, "" for none

	result          agent.Change           // the last result: settings or an error
	lastValidConfig *v1alpha1.DriverConfig // the last valid configuration
	lastValid       agent.Settings         // the last valid settings
}

// labelPatience is how long an agent waits for the node's labels at its first start, to avoid
// offers of devices that would be withdrawn at once.
const labelPatience = 5 * time.Second

// Begin returns the initial settings of an agent. It uses the last labels in force, so that a
// restart changes nothing. If the configuration is invalid, Begin also returns the error, and the
// settings of the last valid configuration in the directory. If there is none, the settings offer
// no new device.
func (f *File) Begin(ctx context.Context, dir string) (settings agent.Settings, wrong error) {
	f.Node.Labels = KeptLabels(ctx, os.DirFS(dir))
	if f.Node.Labels == nil {
		select {
		case f.Node.Labels = <-f.NewLabels:
		case <-time.After(labelPatience):
		case <-ctx.Done():
		}
	}
	f.readChanged()
	f.computeSettings()
	if wrong = f.result.Err; wrong == nil {
		return f.result.Settings, nil
	}
	settings = f.result.Settings
	if f.Name != "" && !errors.Is(wrong, v1alpha1.ErrNoLabels) {
		var err error
		if settings, err = f.lastSettings(filepath.Join(dir, agent.KeptConfig)); err == nil {
			return settings, wrong
		}
		wrong = errors.Join(wrong, fmt.Errorf("read the last configuration that was right: %w", err))
	}
	if settings.Rules == nil {
		settings.Rules = &rules.Rules{Mode: discovery.ModeAuto}
	}
	settings.Rules.Unknown = "the configuration is invalid, and there is no earlier one"
	if errors.Is(wrong, v1alpha1.ErrNoLabels) {
		settings.Rules.Unknown = "the labels of the node are not yet known"
	}
	return settings, wrong
}

// KeptLabels returns the node's labels from an agent's directory, nil if there are none.
func KeptLabels(ctx context.Context, dir fs.FS) (labels map[string]string) {
	data, err := fs.ReadFile(dir, agent.KeptLabels)
	if err == nil {
		err = json.Unmarshal(data, &labels)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		klog.FromContext(ctx).Error(err, "The previous labels of the node are lost")
		return nil
	}
	return labels
}

// lastSettings returns the settings of the last valid configuration.
func (f *File) lastSettings(name string) (agent.Settings, error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return agent.Settings{}, err
	}
	_, settings, err := Parse(data, f.Node)
	return settings, err
}

// followInterval is the interval between reads of the configuration file. The file is small, and
// the kubelet takes up to a minute to update a changed ConfigMap on the node. A watch would have to
// follow the kubelet's links, which swap the files of a volume.
const followInterval = 10 * time.Second

// FollowChanges reads the configuration file and receives the node's labels until the context ends.
// Each result is sent to changes.
func (f *File) FollowChanges(ctx context.Context, changes chan<- agent.Change) {
	ticker := time.NewTicker(followInterval)
	defer ticker.Stop()
	for {
		changed := false
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			changed = f.readChanged()
		case labels := <-f.NewLabels:
			changed = f.Node.Labels == nil || !maps.Equal(f.Node.Labels, labels)
			f.Node.Labels = labels
		}
		before := f.result.Err
		if changed {
			f.computeSettings()
		}
		if !changed || before != nil && f.result.Err != nil && before.Error() == f.result.Err.Error() {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case changes <- f.result:
		}
	}
}

// readChanged reads the file, and reports whether the content or the read error has changed.
func (f *File) readChanged() (changed bool) {
	if f.Name == "" {
		return false
	}
	data, err := os.ReadFile(f.Name)
	if err != nil {
		changed = f.readError != err.Error()
		f.readError = err.Error()
		return changed
	}
	if f.wasRead && f.readError == "" && bytes.Equal(data, f.last) {
		return false
	}
	f.wasRead, f.last, f.readError = true, data, ""
	f.lastValidConfig = nil // the new text must be kept, even if its meaning is the same
	return true
}

// computeSettings computes the settings for the node. If only labels changed and the configuration
// does not depend on them, the rules stay the same.
func (f *File) computeSettings() {
	if f.readError != "" {
		f.result = agent.Change{Err: fmt.Errorf("read config: %s", f.readError)}
		return
	}
	counts, settings, err := Parse(f.last, f.Node)
	if err != nil {
		if f.Name != "" {
			err = fmt.Errorf("config %s: %w", f.Name, err)
		}
		f.result = agent.Change{Settings: settings, Err: err}
		return
	}
	if f.lastValidConfig != nil && equality.Semantic.DeepEqual(counts, f.lastValidConfig) {
		settings.Rules = f.lastValid.Rules
	}
	f.lastValidConfig, f.lastValid, f.result = counts, settings, agent.Change{Settings: settings}
}

// Parse returns the settings for an agent on a node. With the error [v1alpha1.ErrNoLabels],
// the settings are those that do not depend on labels.
func Parse(data []byte, node v1alpha1.Node) (*v1alpha1.DriverConfig, agent.Settings, error) {
	config, err := compile.ForNode(data, node)
	if config == nil {
		return nil, agent.Settings{}, err
	}
	host := ConfiguredHost(nil, config)
	return config.DriverConfig, agent.Settings{
		Rules: config.Rules, Severity: SeverityOf(config.Health.Severity), Roots: host.Roots, Paths: host.Paths, Pools: host.Pools, Passthrough: host.Passthroughs,
		VirtualFunctions: host.VirtualFunctions, Partition: host.Partitionings, SharingDaemons: host.SharingDaemons, IdleTime: idleTime(config.OnDemand), Reclaim: reclaimRules(config), NoHooks: config.Hooks == v1alpha1.HooksNone, Text: data, Labels: node.Labels, LeftAlone: v1alpha1.LeftAlone(node.Labels),
	}, err
}

// idleTime returns how long an unused on-demand device is kept.
func idleTime(o v1alpha1.OnDemand) time.Duration {
	if o.KeepSeconds == nil {
		return 5 * time.Minute
	}
	return time.Duration(*o.KeepSeconds) * time.Second
}
