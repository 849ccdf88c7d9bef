// Package deployments holds the manifests that install Chandler, for the parts of
// it that say how to use them.
package deployments

import _ "embed"

// DeviceClasses are the classes that claims can ask for, as YAML documents.
//
//go:embed deviceclasses.yaml
var DeviceClasses []byte
