package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"chandler.dev/driver"
)

func TestMetricsSayWhatTheServerKeeps(t *testing.T) {
	var features []driver.Feature
	server := httptest.NewServer(metricsHandler(func() []driver.Feature { return features }))
	defer server.Close()
	scrape := func() string {
		response, err := http.Get(server.URL)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s, %v", response.Status, text, err)
		}
		return string(text)
	}
	if text := scrape(); strings.Contains(text, "chandler_dra_server_feature_enabled{") {
		t.Errorf("said before it is known:\n%s", text)
	}
	features = driver.Without{Overhead: true}.Features()
	text := scrape()
	for _, line := range []string{
		"# TYPE chandler_dra_server_feature_enabled gauge",
		`chandler_dra_server_feature_enabled{feature="DRANodeAllocatableResources"} 0`,
		`chandler_dra_server_feature_enabled{feature="DRAPartitionableDevices"} 1`,
		`chandler_dra_server_feature_enabled{feature="SeparateCounters"} 1`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("%q is not said:\n%s", line, text)
		}
	}
	if lines := strings.Count(text, "\nchandler_dra_server_feature_enabled{"); lines != len(features) {
		t.Errorf("%d features, want %d:\n%s", lines, len(features), text)
	}
	// What has changed since is said at the next scrape.
	features = driver.Without{}.Features()
	if text := scrape(); strings.Contains(text, "} 0\n") {
		t.Errorf("still without:\n%s", text)
	}
}
