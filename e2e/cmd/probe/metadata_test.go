package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestMetadata(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "resourceclaims/c/r/chandler.dev-metadata.json")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"apiVersion":"metadata.resource.k8s.io/v9","kind":"DeviceMetadata","requests":{}}`)
	var out strings.Builder
	if err := metadata(&out, dir); err == nil {
		t.Error("a version with another shape is read")
	}
	write(`{"apiVersion":"metadata.resource.k8s.io/v9","kind":"DeviceMetadata","requests":{}}
{"apiVersion":"metadata.resource.k8s.io/v1beta1","kind":"DeviceMetadata","requests":[{"name":"r/sub","devices":[
 {"driver":"chandler.dev","pool":"node","name":"a","attributes":{"model":{"string":"One"},"moduleID":{"int":7},"defaultRoute":{"bool":false}},"networkData":{"interfaceName":"net1"}}]}]}`)
	err := metadata(&out, dir)
	want := "metadata r/sub a defaultRoute=false\nmetadata r/sub a model=One\nmetadata r/sub a moduleID=7\nmetadata r/sub a interface net1\n"
	if err != nil || out.String() != want {
		t.Errorf("got %q, %v; want %q", out.String(), err, want)
	}
}
