package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"chandler.dev/discovery/families"
	"chandler.dev/driver/publish/publishtest"
)

// measureChurn counts the writes of ResourceSlices while the devices of recorded hosts are idle and
// busy in turn, and pods with network interfaces start and end. No write is expected.
func (b *bench) measureChurn(ctx context.Context) error {
	dir := filepath.Join(b.dir, "discovery/families")
	files, err := publishtest.HostFiles(dir)
	if err != nil {
		return err
	}
	var rows [][]string
	var total publishtest.Result
	listed := 0
	for _, file := range files {
		result, err := publishtest.Replay{Families: families.All, Cycles: b.rounds}.Run(ctx, file)
		if err != nil {
			return err
		}
		all, err := publishtest.Replay{Families: families.All, Cycles: b.rounds, AllAttributes: true}.Run(ctx, file)
		if err != nil {
			return err
		}
		host := strings.TrimSuffix(strings.TrimPrefix(file, dir+"/"), ".host")
		rows = append(rows, churnRow(strings.Replace(host, "/testdata/", " ", 1), result, all.Writes))
		total.Devices += result.Devices
		total.Interfaces += result.Interfaces
		total.Scans += result.Scans
		total.Writes += result.Writes
		listed += all.Writes
	}
	rows = append(rows, churnRow(fmt.Sprintf("all %d hosts", len(files)), total, listed))
	b.table("Writes of ResourceSlices because of load:", []string{"recorded host", "devices", "interfaces in pods", "scans", "writes", "writes, if all attributes are listed"}, rows)
	return nil
}

func churnRow(host string, result publishtest.Result, listed int) []string {
	return []string{host, fmt.Sprint(result.Devices), fmt.Sprint(result.Interfaces), fmt.Sprint(result.Scans), fmt.Sprint(result.Writes), fmt.Sprint(listed)}
}
