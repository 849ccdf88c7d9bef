package yamlerror

import "testing"

func TestFind(t *testing.T) {
	for _, test := range []struct {
		text    string
		line    int
		message string
	}{
		{"a: 1\nb: [c, *d]\n", 2, "unknown anchor 'd' referenced"},
		{"a: 1\nb: 2\nc:\n- x: *foo\nd: *foo\n", 4, "unknown anchor 'foo' referenced"},
		{"# *foo\na: &foo 1\n---\nb: '*foo'\nc: *foo\n", 5, "unknown anchor 'foo' referenced"},
		{"a: 1\nb: 2\nc:\n- name: x\n- name: \"a\" \"b\"\nd: 1\n", 5, "did not find expected key"},
		{"a: \"x\" \"y\"\n", 1, "did not find expected key"},
		{"a: 1\nb:\n- c: 1\n- d: 2\n  e: 3\n resource: x\nf: 1\n", 6, "did not find expected key"},
		{"a: 1\n---\nb: 1\nc: 'x' 'y'\n", 4, "did not find expected key"},
		{"- a\nb: 1\n", 2, "did not find expected '-' indicator"},
		{"a: 1\nb: [", 2, "did not find expected node content"},
		{"a: 1\nb: [\nc: 1\n", 3, "did not find expected ',' or ']'"},
		{"a: 1\nb: 2\nc: 3\nd: \"x\ne: 1\n", 4, "found unexpected end of stream"},
		{"d: \"x\ne: 1\n", 1, "found unexpected end of stream"},
		{"a: 1\nb\nc: 1\n", 2, "could not find expected ':'"},
		{"a: b: c\n", 1, "mapping values are not allowed in this context"},
		{"a: 1\nb: c: d\n", 2, "mapping values are not allowed in this context"},
		{"a: 1\nb: @x\n", 2, "found character that cannot start any token"},
		{"a: 1\nb: \"\\y\"\n", 2, "found unknown escape character"},
		{"a: \x01\n", 0, "control characters are not allowed"},
		{"a: &b 1\nc: *b\n---\n{}\n", 0, ""},
		{"", 0, ""},
	} {
		line, message := Find(test.text)
		if line != test.line || message != test.message {
			t.Errorf("%q: %d: %s; want %d: %s", test.text, line, message, test.line, test.message)
		}
	}
}
