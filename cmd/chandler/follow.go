package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"chandler.dev/cmd/chandler/agent"
)

// configFile is the configuration file of an agent that runs, none if the name is "".
type configFile struct {
	name   string
	read   bool   // it was read before
	last   []byte // its content then
	unread string // why it could not be read then, "" if it could
}

// begin returns the settings with which an agent starts. If the configuration is
// wrong, it also returns why, and the settings are those of the configuration that
// was kept in a file, or ones with which nothing is offered anew.
func (f *configFile) begin(kept string) (settings agent.Settings, wrong error) {
	if f.name == "" {
		return agent.Settings{Rules: defaultRules()}, nil
	}
	change, _ := f.next()
	if change.Err == nil {
		return change.Settings, nil
	}
	data, err := os.ReadFile(kept)
	if err == nil {
		settings, err = parseSettings(data)
	}
	if err != nil {
		settings = agent.Settings{Rules: defaultRules()}
		settings.Rules.Unknown = "the configuration is wrong, and no earlier one is known"
		return settings, errors.Join(change.Err, fmt.Errorf("read the last configuration that was right: %w", err))
	}
	return settings, change.Err
}

// followInterval is how often the configuration file is read again. The file is
// small, and the kubelet takes up to a minute to bring a changed ConfigMap to the
// node, so the file is read rather than watched: a watch would have to follow the
// links by which the kubelet swaps the files of a volume.
const followInterval = 10 * time.Second

// follow reads the configuration file until the context ends, and sends what becomes
// of it to changes.
func (f *configFile) follow(ctx context.Context, changes chan<- agent.Change) {
	ticker := time.NewTicker(followInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		change, changed := f.next()
		if !changed {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case changes <- change:
		}
	}
}

// next reads the file, and returns what it says, or why it is wrong. It returns false
// if that is the same as the last time.
func (f *configFile) next() (_ agent.Change, changed bool) {
	data, err := os.ReadFile(f.name)
	if err != nil {
		changed = f.unread != err.Error()
		f.unread = err.Error()
		return agent.Change{Err: fmt.Errorf("read config: %w", err)}, changed
	}
	if f.read && f.unread == "" && bytes.Equal(data, f.last) {
		return agent.Change{}, false
	}
	f.read, f.last, f.unread = true, data, ""
	settings, err := parseSettings(data)
	if err != nil {
		return agent.Change{Err: fmt.Errorf("config %s: %w", f.name, err)}, true
	}
	return agent.Change{Settings: settings}, true
}
