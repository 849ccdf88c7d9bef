// Package jsonerror describes errors in terms of the file that a user wrote.
package jsonerror

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strings"
)

// Describe returns err with the path of the field and the expected type if err is about a value of
// the wrong type in data, and err itself otherwise. The path contains the indexes of lists, such as
// spec.devices.requests[1].exactly.count.
func Describe(data []byte, err error) error {
	var wrong *json.UnmarshalTypeError
	if !errors.As(err, &wrong) {
		return err
	}
	path := pathAt(data, wrong.Offset)
	// The field has no indexes and no keys of maps. It differs if the offset is one inside a value that
	// decodes itself.
	if bare := index.ReplaceAllString(path, ""); bare != wrong.Field && (wrong.Field == "" || !strings.HasPrefix(bare, wrong.Field+".")) {
		path = wrong.Field
	}
	return FieldError{path, fmt.Sprintf("is %s; want %s", valueText(wrong.Value), typeText(wrong.Type))}
}

// FieldError is an error of a field, or of the whole document if the path is empty.
type FieldError struct{ Path, Text string }

func (e FieldError) Error() string {
	if e.Path == "" {
		return e.Text
	}
	return e.Path + ": " + e.Text
}

// FieldPath returns the path. The errors of sigs.k8s.io/json have the same method.
func (e FieldError) FieldPath() string { return e.Path }

// index matches the index of a list in a path.
var index = regexp.MustCompile(`\[\d+\]`)

// pathAt returns the path of the value that ends or begins at an offset of a JSON document, as
// [json.UnmarshalTypeError] counts it, and "" if there is none.
func pathAt(data []byte, offset int64) string {
	decoder := json.NewDecoder(bytes.NewReader(data))
	var levels []level
	for {
		token, err := decoder.Token()
		if err != nil {
			return ""
		}
		if delim, is := token.(json.Delim); is && (delim == '}' || delim == ']') {
			levels = levels[:len(levels)-1]
			continue
		}
		isKey := false
		if n := len(levels); n > 0 {
			isKey = levels[n-1].next(token)
		}
		if !isKey && decoder.InputOffset() >= offset {
			return pathOf(levels)
		}
		switch token {
		case json.Delim('{'):
			levels = append(levels, level{})
		case json.Delim('['):
			levels = append(levels, level{list: true, index: -1})
		}
	}
}

// A level is an object or a list that encloses a value.
type level struct {
	list  bool
	index int    // of the present item of a list
	key   string // of the present value of an object
	value bool   // in an object, the next token begins a value
}

// next proceeds to a token of the level, and reports whether it is the key of a value.
func (l *level) next(token json.Token) (isKey bool) {
	switch {
	case l.list:
		l.index++
	case l.value:
		l.value = false
	default:
		l.key, _ = token.(string)
		l.value = true
		return true
	}
	return false
}

func pathOf(levels []level) string {
	var path strings.Builder
	for _, l := range levels {
		switch {
		case l.list:
			fmt.Fprintf(&path, "[%d]", l.index)
		case path.Len() > 0:
			path.WriteString("." + l.key)
		default:
			path.WriteString(l.key)
		}
	}
	return path.String()
}

// valueText describes the value of a [json.UnmarshalTypeError], such as "array" or "number 1.5".
func valueText(value string) string {
	if number, is := strings.CutPrefix(value, "number "); is {
		return number
	}
	switch value {
	case "array":
		return "a list"
	case "object":
		return "an object"
	case "bool":
		return "a boolean"
	}
	return "a " + value
}

// typeText describes the JSON value that a Go type is decoded from.
func typeText(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "a string"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Map, reflect.Struct:
		return "an object"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Pointer:
		return typeText(t.Elem())
	}
	return "an integer"
}
