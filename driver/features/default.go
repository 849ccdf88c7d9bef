package features

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"
)

// Newest is the newest version of Kubernetes supported by [Default].
const Newest = "1.37"

// Default returns the features of an API server with the default feature gates of a version
// (pkg/features/kube_features.go, read in 1.34 to 1.37). Versions later than [Newest] are unknown, and
// versions before 1.34 have no resource.k8s.io/v1; both are an error.
func Default(of string) (Set, error) {
	v, err := version.ParseGeneric(of)
	switch {
	case err != nil, v.LessThan(version.MustParseGeneric("1.34")), version.MustParseGeneric(Newest + ".9999").LessThan(v):
		return Set{}, fmt.Errorf("version of Kubernetes %q: want 1.34 to %s", of, Newest)
	case v.LessThan(version.MustParseGeneric("1.36")):
		return Set{}, nil // all features are alpha
	}
	return Set{Bindings: true, Sharing: true, Separate: true, Counters: true, NoEffectTaints: true, Taints: true}, nil
}

// With returns the set with features switched on and off by name. An unknown name is an error.
func (s Set) With(gates map[string]bool) (Set, error) {
	for name, on := range gates {
		known := func(f field) bool { return f.name == name }
		if !slices.ContainsFunc(s.fields(), known) {
			return Set{}, fmt.Errorf("feature %q: there is none of that name; there are %s", name, strings.Join(Set{}.MissingNames(), ", "))
		}
		s.set(name, on)
	}
	return s, nil
}
