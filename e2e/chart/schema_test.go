package chart

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/api/v1alpha1"
)

// TestSchemaOfConfig compares the chart's schema of the value config with the type DriverConfig.
func TestSchemaOfConfig(t *testing.T) {
	file := filepath.Join(chartDir, "values.schema.json")
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	if err := json.Unmarshal(data, &schema); err != nil {
		t.Fatal(err)
	}
	config := schemaOf(t, reflect.TypeFor[v1alpha1.DriverConfig]())
	resources := config["properties"].(map[string]any)["resources"].(map[string]any)["items"].(map[string]any)["properties"].(map[string]any)
	resources["mode"] = map[string]any{"enum": []any{v1alpha1.ModeAuto, v1alpha1.ModeDRA, v1alpha1.ModeDevicePlugin}}
	config["description"] = "The fields of a DriverConfig, without apiVersion and kind."
	for previous, name := range v1alpha1.Renamed { // the templates refuse these
		config["properties"].(map[string]any)[previous] = map[string]any{"description": "Renamed to " + name + "."}
	}
	schema["properties"].(map[string]any)["config"] = config
	var want bytes.Buffer
	encoder := json.NewEncoder(&want)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(schema); err != nil {
		t.Fatal(err)
	}
	if *update {
		data = want.Bytes()
		if err := os.WriteFile(file, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(data, want.Bytes()) {
		t.Errorf("%s is not what the types say, or not in order; run make manifests", file)
	}
}

// enums lists the values of enumeration types.
var enums = map[reflect.Type][]any{
	reflect.TypeFor[v1alpha1.Mode](): {v1alpha1.ModeAuto, v1alpha1.ModeDRA, v1alpha1.ModeDevicePlugin, v1alpha1.ModeReportOnly},
	reflect.TypeFor[v1alpha1.Effect](): {
		v1alpha1.EffectNone, v1alpha1.EffectNoSchedule, v1alpha1.EffectNoExecute,
	},
}

// schemaOf returns the JSON schema of a configuration type. Like the agent, the schema refuses
// unknown fields.
func schemaOf(t *testing.T, of reflect.Type) map[string]any {
	if values := enums[of]; values != nil {
		return map[string]any{"enum": values}
	}
	if of == reflect.TypeFor[resource.Quantity]() {
		return map[string]any{"type": []string{"string", "number"}}
	}
	switch of.Kind() {
	case reflect.Pointer:
		return schemaOf(t, of.Elem())
	case reflect.String:
		return map[string]any{"type": "string"}
	case reflect.Bool:
		return map[string]any{"type": "boolean"}
	case reflect.Int:
		return map[string]any{"type": "integer"}
	case reflect.Slice:
		return map[string]any{"type": "array", "items": schemaOf(t, of.Elem())}
	case reflect.Map:
		return map[string]any{"type": "object", "additionalProperties": schemaOf(t, of.Elem())}
	case reflect.Struct:
		properties := make(map[string]any)
		addFields(t, of, properties)
		return map[string]any{"type": "object", "properties": properties, "additionalProperties": false}
	}
	t.Fatalf("there is no schema for %v", of)
	return nil
}

func addFields(t *testing.T, of reflect.Type, properties map[string]any) {
	for field := range of.Fields() {
		if field.Type == reflect.TypeFor[metav1.TypeMeta]() {
			continue
		}
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		if options == "inline" {
			addFields(t, field.Type, properties)
			continue
		}
		properties[name] = schemaOf(t, field.Type)
	}
}
