package agent

import (
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/cmd/chandler/agent/cluster"
)

// servesDRA reports whether the API server serves resource.k8s.io in a version that the driver
// supports: v1beta1 or later. A successful detection of features, which the driver needs in any case,
// saves the request for the group.
func (a *agent) servesDRA(ctx context.Context) (bool, error) {
	if !a.withoutDRA.Load() && a.driver.Publisher.DetectFeatures(ctx) == nil {
		return true, nil
	}
	ctx, cancel := context.WithTimeout(ctx, cluster.AskTimeout)
	defer cancel()
	versions, err := a.ServedVersions(ctx)
	if err != nil {
		return false, fmt.Errorf("get API group %s: %w", resourceapi.GroupName, err)
	}
	return slices.ContainsFunc(versions, func(version string) bool {
		return version == "v1" || version == "v1beta2" || version == "v1beta1"
	}), nil
}

// awaitTurn keeps an agent with an invalid configuration from registering the driver while another
// agent of the node holds the lock. The kubelet calls the plugin that registered last
// (pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go, get, read in 1.34 and 1.37). This agent is not
// ready, so the other agent goes on running, and the kubelet's calls would wait here in vain.
func (a *agent) awaitTurn(ctx context.Context) {
	if a.ConfigError == nil {
		return
	}
	select {
	case <-a.lockHeld:
	case <-a.settings.firstValid:
	case <-ctx.Done():
	}
}
