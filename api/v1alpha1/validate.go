package v1alpha1

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

func (m Mode) validate() error {
	switch m {
	case "", ModeAuto, ModeDRA, ModeDevicePlugin:
		return nil
	}
	return fmt.Errorf("is %q; want %s, %s or %s", string(m), ModeAuto, ModeDRA, ModeDevicePlugin)
}

func (s Selector) validate() error {
	if strings.TrimSpace(s.CEL) == "" {
		return errors.New("must not be empty")
	}
	return nil
}

// validateResourceName checks a name as the API server does for an extended
// resource of a container: a domain, a slash and a name.
func validateResourceName(name string) error {
	domain, _, qualified := strings.Cut(name, "/")
	if !qualified || domain == "" {
		return fmt.Errorf("is %q; want a domain and a name, such as example.com/gpu", name)
	}
	if domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io") {
		return fmt.Errorf("is %q; the domain kubernetes.io is Kubernetes' own", name)
	}
	if messages := validation.IsQualifiedName(name); len(messages) > 0 {
		return fmt.Errorf("is %q; %s", name, strings.Join(messages, "; "))
	}
	return nil
}

func validateRoot(root string) error {
	if !path.IsAbs(root) || path.Clean(root) != root {
		return fmt.Errorf("is %q; want a clean absolute path, such as /run/nvidia/driver", root)
	}
	return nil
}
