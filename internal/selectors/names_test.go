package selectors_test

import (
	"strings"
	"testing"

	"chandler.dev/internal/selectors"
)

func TestReadNames(t *testing.T) {
	for expression, want := range map[string]string{
		`device.attributes["a.b"].one == "x" || device.attributes['a.b'].?two.orValue("y") == "z"`: "attributes/a.b/one attributes/a.b/two",
		`device.attributes["a.b"]["one"] == 1 && device.attributes[?"a.b"][?"two"].hasValue()`:     "attributes/a.b/one attributes/a.b/two",
		`"one" in device.attributes["a.b"] && "two" in ["one"]`:                                    "attributes/a.b/one",
		`has(device.attributes["a.b"].one) && !(device.capacity["c.d"].two > 1)`:                   "attributes/a.b/one capacity/c.d/two",
		`cel.bind(a, device.attributes["a.b"], a.one == a[?"two"].orValue("")) && a.three`:         "attributes/a.b/one attributes/a.b/two",
		`cel.bind(all, device.attributes, all["a.b"].one) ? [device.capacity["a.b"].two] : []`:     "attributes/a.b/one capacity/a.b/two",
		`["x"].exists(v, device.attributes["a.b"].one == v)`:                                       "attributes/a.b/one",
		`{"k": device.attributes["a.b"].one}`:                                                      "attributes/a.b/one",
		`device.attributes["a.b"].one.two == device.driver`:                                        "attributes/a.b/one",
		`device.attributes["a.b"].one == `:                                                         "",
		`device.attributes[x].one`:                                                                 "",
	} {
		names, _ := selectors.ReadNames(expression)
		var got []string
		for _, n := range names {
			got = append(got, n.Map+"/"+n.Domain+"/"+n.Local)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %q; want %q", expression, got, want)
		}
	}
	_, literals := selectors.ReadNames(`device.driver == "a.b" || device.driver in ["c.d", 'a.b']`)
	if got := strings.Join(literals, " "); got != "a.b c.d" {
		t.Errorf("literals %q", got)
	}
}
