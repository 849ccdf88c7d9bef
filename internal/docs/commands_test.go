package docs

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCommands(t *testing.T) {
	block := Block{Line: 7, Lang: "sh", Text: "A=1 make x   # why; not\n" +
		"kubectl get 'a b' -o \"c|d\" | chandler validate - > out.yaml && cd e2e\n" +
		"helm install \\\n  --set a=b 2> errors || echo '#'\nA=b\n"}
	got, err := block.Commands()
	if err != nil {
		t.Fatal(err)
	}
	want := []Command{
		{Line: 7, Words: []string{"make", "x"}},
		{Line: 8, Words: []string{"kubectl", "get", "a b", "-o", "c|d"}},
		{Line: 8, Words: []string{"chandler", "validate", "-"}, Piped: true},
		{Line: 8, Words: []string{"cd", "e2e"}},
		{Line: 10, Words: []string{"helm", "install", "--set", "a=b"}},
		{Line: 10, Words: []string{"echo", "#"}},
		{Line: 11, Words: []string{"A=b"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if _, err := (Block{Lang: "sh", Text: "echo 'a\n"}).Commands(); err == nil {
		t.Error("an open quote is no error")
	}
}

// In a block with output, commands have a prompt.
func TestCommandsWithOutput(t *testing.T) {
	got, err := Block{Line: 1, Lang: "console", Text: "$ a b\nout put\n$ c\n"}.Commands()
	want := []Command{{Line: 1, Words: []string{"a", "b"}}, {Line: 3, Words: []string{"c"}}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v, -want +got:\n%s", err, diff)
	}
}
