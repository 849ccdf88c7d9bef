package command

import (
	"fmt"
	"regexp"
)

// notDecoded matches the error for a readable file that is not a kubeconfig (loader.go of
// k8s.io/client-go/tools/clientcmd 0.37, Load). The rest of the error names Go types.
var notDecoded = regexp.MustCompile(`error loading config file "([^"]+)": (?:couldn't get version/kind|no kind |yaml: |error converting YAML)`)

// KubeconfigError replaces an error of loading a kubeconfig by a readable one.
func KubeconfigError(err error) error {
	if err == nil {
		return nil
	}
	if found := notDecoded.FindStringSubmatch(err.Error()); found != nil {
		return fmt.Errorf("%s is not a kubeconfig", found[1])
	}
	return err
}
