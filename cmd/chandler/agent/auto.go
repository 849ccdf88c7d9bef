package agent

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/cluster"
	devices "chandler.dev/discovery"
	"chandler.dev/driver"
	"chandler.dev/driver/publish"
	"chandler.dev/internal/disk"
)

// askInterval is how often the agent checks again whether an API server serves resource.k8s.io,
// after the group was missing.
const askInterval = time.Minute

// autoMode chooses the API for devices in mode Auto. It chooses DRA if the API server serves
// resource.k8s.io and the kubelet has registered the driver, and the device plugin API if the group
// is not served or the kubelet refuses the driver. While either of them does not answer, autoMode
// keeps the last choice. The choice is stored in a file.
type autoMode struct {
	*stateFile
	servesDRA    func(context.Context) (bool, error)
	registration func() driver.Registration

	last      devices.Mode
	answer    devices.Mode // the last result of a request to the API server
	nextCheck time.Time    // time of the next request
	pause     wait.Backoff // until the next request after a failure
}

// autoFile is the name of the file with the choice, in the agent's directory.
const autoFile = "mode"

// newAuto reads the last choice from the file.
func newAuto(ctx context.Context, served func(context.Context) (bool, error), registration func() driver.Registration, files disk.Files, stateDir string) *autoMode {
	a := &autoMode{servesDRA: served, registration: registration, pause: publish.NewPause()}
	a.stateFile = openMemo(ctx, files, filepath.Join(stateDir, autoFile), func(data []byte) (err error) {
		a.last, err = parseAuto(data)
		return err
	})
	return a
}

// chooseMode returns the present choice, or "" if no choice was possible yet.
func (a *autoMode) chooseMode(ctx context.Context) devices.Mode {
	choice := a.determineMode(ctx)
	if choice != a.last && choice != devices.ModeAuto {
		klog.FromContext(ctx).Info("Chose the API for devices without a mode of their own", "mode", choice)
		a.last = choice
	}
	if a.last != "" {
		a.write(ctx, []byte(a.last))
	}
	return a.last
}

func (a *autoMode) determineMode(ctx context.Context) devices.Mode {
	switch a.registration() {
	case driver.Accepted:
		return devices.ModeDRA
	case driver.Refused:
		return devices.ModeDevicePlugin
	}
	if time.Now().Before(a.nextCheck) {
		return a.answer
	}
	a.answer = devices.ModeAuto
	served, err := a.servesDRA(ctx)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("The API server does not answer whether it serves DRA", "error", err)
		a.nextCheck = time.Now().Add(a.pause.Step())
		return a.answer
	}
	if !served {
		a.answer = devices.ModeDevicePlugin
	} // otherwise the kubelet has yet to register the driver
	a.nextCheck, a.pause = time.Now().Add(askInterval), publish.NewPause()
	return a.answer
}

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
	case <-a.firstValid:
	case <-ctx.Done():
	}
}
