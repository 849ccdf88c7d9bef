package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// metadataDir is the directory of device attributes in containers, as drivers publish them
// (KEP-5304).
const metadataDir = "/var/run/kubernetes.io/dra-device-attributes"

// deviceMetadata holds the used fields of an object of metadata.resource.k8s.io. The fields are the
// same in v1alpha1 and v1beta1.
type deviceMetadata struct {
	Requests []struct {
		Name    string
		Devices []struct {
			Driver, Pool, Name string
			Attributes         map[string]map[string]any // Each inner map has one entry: the type and the value.
			NetworkData        struct{ InterfaceName string }
		}
	}
}

// metadata prints the files below dir. Each file is a stream of objects with the same content in
// different versions. metadata reads the first object of a supported version.
func metadata(out io.Writer, dir string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "-metadata.json") {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		object, err := readMetadata(data)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		for _, request := range object.Requests {
			for _, device := range request.Devices {
				about := fmt.Sprintf("metadata %s %s", request.Name, device.Name)
				for _, name := range slices.Sorted(maps.Keys(device.Attributes)) {
					for _, value := range device.Attributes[name] {
						fmt.Fprintf(out, "%s %s=%v\n", about, name, value)
					}
				}
				if name := device.NetworkData.InterfaceName; name != "" {
					fmt.Fprintln(out, about, "interface", name)
				}
			}
		}
		return nil
	})
}

func readMetadata(data []byte) (deviceMetadata, error) {
	for stream := json.NewDecoder(bytes.NewReader(data)); ; {
		var raw json.RawMessage
		var version struct{ APIVersion, Kind string }
		err := stream.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return deviceMetadata{}, errors.New("no version that is understood")
		}
		if err == nil {
			err = json.Unmarshal(raw, &version)
		}
		if err != nil {
			return deviceMetadata{}, err
		}
		if version.Kind == "DeviceMetadata" && slices.Contains([]string{"metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"}, version.APIVersion) {
			var object deviceMetadata
			decoder := json.NewDecoder(bytes.NewReader(raw))
			decoder.UseNumber() // Keep whole numbers as they are written.
			err := decoder.Decode(&object)
			return object, err
		}
	}
}
