package validation

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/resource"
	"k8s.io/kubernetes/pkg/registry/resource/deviceclass"
	"k8s.io/kubernetes/pkg/registry/resource/resourceclaim"
	"k8s.io/kubernetes/pkg/registry/resource/resourceclaimtemplate"
	"sigs.k8s.io/yaml"
)

// TestServerTakesManifests creates every DeviceClass, ResourceClaim and template of deployments/
// with the default gates. The expressions must compile and must not exceed the server's cost limit.
func TestServerTakesManifests(t *testing.T) {
	taken := make(map[string]int)
	err := filepath.WalkDir("../../deployments", func(file string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Name() == "helm" { // The manifests are rendered from here.
			return fs.SkipDir
		}
		if err != nil || filepath.Ext(file) != ".yaml" {
			return err
		}
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		for document := range bytes.SplitSeq(data, []byte("\n---\n")) {
			var kind metav1.TypeMeta
			if err := yaml.Unmarshal(document, &kind); err != nil {
				t.Errorf("%s: %v", file, err)
			}
			if !strings.HasPrefix(kind.APIVersion, "resource.k8s.io/") {
				continue
			}
			taken[kind.Kind]++
			if err := create(document); err != nil {
				t.Errorf("%s: %v", file, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"DeviceClass", "ResourceClaimTemplate"} {
		if taken[kind] == 0 {
			t.Errorf("there is no %s", kind)
		}
	}
}

// create runs the server's code for the creation of an object.
func create(document []byte) error {
	object, err := runtime.Decode(legacyscheme.Codecs.UniversalDecoder(), document)
	if err != nil {
		return err
	}
	accessor, err := meta.Accessor(object)
	if err != nil {
		return err
	}
	rest.FillObjectMetaSystemFields(accessor)
	var strategy rest.RESTCreateStrategy
	switch object.(type) {
	case *resource.DeviceClass:
		strategy = deviceclass.Strategy
	case *resource.ResourceClaim:
		strategy = resourceclaim.NewStrategy(nil, nil)
	case *resource.ResourceClaimTemplate:
		strategy = resourceclaimtemplate.NewStrategy(nil)
	}
	namespace := accessor.GetNamespace()
	if strategy.NamespaceScoped() && namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	ctx := genericapirequest.WithNamespace(genericapirequest.NewContext(), namespace)
	ctx = genericapirequest.WithRequestInfo(ctx, &genericapirequest.RequestInfo{APIGroup: "resource.k8s.io", APIVersion: "v1"})
	return rest.BeforeCreate(strategy, ctx, object)
}
