package jsonerror

import (
	"encoding/json"
	"errors"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	kubejson "sigs.k8s.io/json"
)

func TestDescribe(t *testing.T) {
	for _, test := range []struct{ data, want string }{
		{`{"spec":{"devices":{"requests":[{"name":"a"},{"name":"b","exactly":{"count":"two","deviceClassName":"x"}}]}}}`,
			"spec.devices.requests[1].exactly.count: is a string; want an integer"},
		{`{"spec":{"devices":{"requests":[{"name":"a", "exactly": {"count": 1.5}}]}}}`, "spec.devices.requests[0].exactly.count: is 1.5; want an integer"},
		{`{"spec":{"devices":{"requests": {"name":"x"}}}}`, "spec.devices.requests: is an object; want a list"},
		{`{"metadata":{"labels":{"a":"b"}},"spec":{"devices":{"requests":[{"name":"a","exactly":{"adminAccess":"yes"}}]}}}`, "spec.devices.requests[0].exactly.adminAccess: is a string; want true or false"},
		{`{"spec":{"devices":{"requests":[{"name":["a"]}]}}}`, "spec.devices.requests[0].name: is a list; want a string"},
		{`{"spec":{"devices":{"constraints":[{"requests":["a",true]}]}}}`, "spec.devices.constraints[0].requests[1]: is a boolean; want a string"},
		{`{"metadata":{"labels":{"a":1}}}`, "metadata.labels.a: is a number; want a string"},
		{`[1]`, "is a list; want an object"},
	} {
		_, err := kubejson.UnmarshalStrict([]byte(test.data), &resourceapi.ResourceClaim{})
		if err == nil {
			t.Fatalf("%s is decoded", test.data)
		}
		if got := Describe([]byte(test.data), err); got.Error() != test.want {
			t.Errorf("%s: %v, described as %q, want %q", test.data, err, got, test.want)
		}
	}
	if other := errors.New("other"); !errors.Is(Describe(nil, other), other) {
		t.Error("another error is changed")
	}
}

func FuzzDescribe(f *testing.F) {
	f.Add([]byte(`{"spec":{"devices":{"requests":[{"exactly":{"count":"two"}}]}}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := json.Unmarshal(data, &resourceapi.ResourceClaim{}); err != nil && Describe(data, err).Error() == "" {
			t.Errorf("no text for %v", err)
		}
	})
}
