package cluster

import (
	"fmt"
	"testing"
	"time"
)

func TestKilobytes(t *testing.T) {
	status := fmt.Sprintf("Name:\tx\nVmRSS:\t   %d kB\nRssAnon:\t 3 kB\n", 40)
	if got, err := kilobytes(status, "VmRSS"); err != nil || got != 40<<10 {
		t.Errorf("VmRSS: %d, %v", got, err)
	}
	if _, err := kilobytes(status, "RssFile"); err == nil {
		t.Error("a field that is not there was found")
	}
}

func TestProcessorTime(t *testing.T) {
	stat := "7 (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 150 25 0 0 20 20 0 9 0 100"
	if got, err := processorTime(stat); err != nil || got != 1750*time.Millisecond {
		t.Errorf("%s, %v", got, err)
	}
	if _, err := processorTime("7 (a) S 1"); err == nil {
		t.Error("a short stat was read")
	}
}
