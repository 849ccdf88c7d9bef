package source

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// FuzzPlainJSON checks that comments and trailing commas do not change the content of JSON.
func FuzzPlainJSON(f *testing.F) {
	f.Add(`{"a": "// no comment", "b": [1, {"c": null}], "d": "\\\""}`)
	f.Add(`[]`)
	f.Fuzz(func(t *testing.T, text string) {
		var want, got any
		if json.Unmarshal([]byte(text), &want) != nil || !strings.HasPrefix(text, "{") && !strings.HasPrefix(text, "[") {
			plainJSON(text)
			return
		}
		littered := "// here\n" + strings.TrimRight(text, " \n\t\r") + " /* and\nhere */,\n"
		for _, text := range []string{text, littered} {
			plain, ok := plainJSON(text)
			if !ok {
				t.Fatalf("no JSON: %s", text)
			}
			if err := json.Unmarshal([]byte(strings.TrimRight(plain, " \n,")), &got); err != nil || !reflect.DeepEqual(want, got) {
				t.Fatalf("%v: %s became %s", err, text, plain)
			}
		}
	})
}

// FuzzWords checks that words reverses the quoting for a shell.
func FuzzWords(f *testing.F) {
	f.Add("--device", `{"name": "it's"}`)
	f.Add("a b", "--c=\\d")
	f.Fuzz(func(t *testing.T, a, b string) {
		SplitWords(a, 1)
		text := ""
		for _, word := range []string{a, b} {
			text += " '" + strings.ReplaceAll(word, "'", `'\''`) + "'"
		}
		got := SplitWords(text, 1)
		if len(got) != 2 || got[0].Value != a || got[1].Value != b {
			t.Fatalf("%q became %v", text, got)
		}
	})
}
