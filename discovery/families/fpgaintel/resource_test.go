package fpgaintel

import (
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
)

// TestResource uses the names in the Intel documentation.
func TestResource(t *testing.T) {
	for want, ids := range map[string][2]string{
		"fpga.intel.com/af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs": {"69528db6eb31577a8c3668f9faa081f6", "d8424dc4a4a3c413f89e433683f9040b"},
		"fpga.intel.com/af-ce4.d84.zkiWk5jwXzOUbVYHCL4QithCTcSko8QT-J5DNoP5BAs": {"ce48969398f05f33946d560708be108a", "d8424dc4a4a3c413f89e433683f9040b"},
		"fpga.intel.com/af-bfa.f7d.v6xNhR7oVv6MlYZc4buqLfffQFy9es9yIvFEsLk6zRg": {"bfac4d851ee856fe8c95865ce1bbaa2d", "f7df405cbd7acf7222f144b0b93acd18"},
	} {
		if got := resource(ids[0], ids[1]); got != want {
			t.Errorf("%v: got %s, want %s", ids, got, want)
		}
	}
}

func FuzzResource(f *testing.F) {
	f.Add("69528db6eb31577a8c3668f9faa081f6", "d8424dc4a4a3c413f89e433683f9040b")
	f.Add("", "d8424dc4a4a3c413f89e433683f9040b")
	f.Add("ffffffffffffffffffffffffffffffff", "ffffffffffffffffffffffffffffffff")
	f.Fuzz(func(t *testing.T, region, afu string) {
		if !idDigits().MatchString(region) || !idDigits().MatchString(afu) {
			return // readID refuses such IDs
		}
		if messages := validation.IsQualifiedName(resource(region, afu)); len(messages) > 0 {
			t.Errorf("%s, %s: %v", region, afu, messages)
		}
	})
}
