package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"time"

	"chandler.dev/cmd/chandler/agent"
)

// followInterval is how often the configuration file is read again. The file is
// small, and the kubelet takes up to a minute to bring a changed ConfigMap to the
// node, so the file is read rather than watched: a watch would have to follow the
// links by which the kubelet swaps the files of a volume.
const followInterval = 10 * time.Second

// followConfig reads the configuration file until the context ends, and sends what
// becomes of it to changes: new settings, or why a new configuration is wrong. Each
// content, and each reason why the file cannot be read, is sent once. last is the
// content that is in force.
func followConfig(ctx context.Context, file string, last []byte, changes chan<- agent.Change) {
	ticker := time.NewTicker(followInterval)
	defer ticker.Stop()
	unread := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		data, err := os.ReadFile(file)
		var change agent.Change
		switch {
		case err != nil && err.Error() == unread, err == nil && unread == "" && bytes.Equal(data, last):
			continue
		case err != nil:
			unread = err.Error()
			change.Err = fmt.Errorf("read config: %w", err)
		default:
			last, unread = data, ""
			change = changeTo(file, data)
		}
		select {
		case <-ctx.Done():
			return
		case changes <- change:
		}
	}
}

// changeTo compiles a configuration.
func changeTo(file string, data []byte) agent.Change {
	config, rules, err := parseConfig(data)
	if err != nil {
		return agent.Change{Err: fmt.Errorf("config %s: %w", file, err)}
	}
	return agent.Change{Settings: settingsOf(config, rules)}
}
