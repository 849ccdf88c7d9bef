package v1alpha1

import (
	"errors"
	"fmt"
	"path"
	"regexp"
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

// interfaceName is stricter than the kernel (net/core/dev.c, dev_valid_name),
// which takes any bytes but a few.
var interfaceName = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,15}$`)

func validateInterfaceName(name string) error {
	switch {
	case name == "":
		return nil
	case !interfaceName.MatchString(name) || name == "." || name == "..":
		return fmt.Errorf("interfaceName: is %q; want 1 to 15 letters, digits, '-', '_' and '.', such as net1", name)
	case name == "lo":
		return fmt.Errorf("interfaceName: is %q, which every container has already", name)
	}
	return nil
}

var hexadecimal = regexp.MustCompile(`^[0-9A-Fa-f]{8,40}$`)

func validateAcceleratorFunction(id string) error {
	if id == "" || hexadecimal.MatchString(strings.ReplaceAll(id, "-", "")) {
		return nil
	}
	return fmt.Errorf("acceleratorFunction: is %q; want 8 to 40 hexadecimal digits", id)
}
