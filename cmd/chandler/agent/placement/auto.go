package placement

import (
	"context"
	"math/rand/v2"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/statefile"
	"chandler.dev/discovery"
	"chandler.dev/driver"
	"chandler.dev/internal/backoff"
	"chandler.dev/internal/disk"
)

// ServedInterval returns the time, about a minute, until the agent checks again whether an API server
// serves resource.k8s.io, after the group was missing. The nodes of a cluster check at different times.
func ServedInterval() time.Duration { return 45*time.Second + rand.N(30*time.Second) }

// autoMode chooses the API for devices in mode Auto. It chooses DRA if the API server serves
// resource.k8s.io and the kubelet has registered the driver, and the device plugin API if the group
// is not served or the kubelet refuses the driver. While either of them does not answer, autoMode
// keeps the last choice. The choice is stored in a file.
type autoMode struct {
	*statefile.File
	servesDRA    func(context.Context) (bool, error)
	registration func() driver.Registration

	last      discovery.Mode
	answer    discovery.Mode // the last result of a request to the API server
	nextCheck time.Time      // time of the next request
	pause     wait.Backoff   // until the next request after a failure
}

// autoFile is the name of the file with the choice, in the agent's directory.
const autoFile = "mode"

// newAuto reads the last choice from the file.
func newAuto(ctx context.Context, served func(context.Context) (bool, error), registration func() driver.Registration, files disk.Files, stateDir string) *autoMode {
	a := &autoMode{servesDRA: served, registration: registration, pause: backoff.NewPause()}
	a.File = statefile.Open(ctx, files, filepath.Join(stateDir, autoFile), func(data []byte) (err error) {
		a.last, err = parseAuto(data)
		return err
	})
	return a
}

// chooseMode returns the present choice, or "" if no choice was possible yet.
func (a *autoMode) chooseMode(ctx context.Context) discovery.Mode {
	choice := a.determineMode(ctx)
	if choice != a.last && choice != discovery.ModeAuto {
		klog.FromContext(ctx).Info("Chose the API for devices without a mode of their own", "mode", choice)
		a.last = choice
	}
	if a.last != "" {
		a.Write(ctx, []byte(a.last))
	}
	return a.last
}

func (a *autoMode) determineMode(ctx context.Context) discovery.Mode {
	switch a.registration() {
	case driver.Accepted:
		return discovery.ModeDRA
	case driver.Refused:
		return discovery.ModeDevicePlugin
	}
	if time.Now().Before(a.nextCheck) {
		return a.answer
	}
	a.answer = discovery.ModeAuto
	served, err := a.servesDRA(ctx)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("The API server does not answer whether it serves DRA", "error", err)
		a.nextCheck = time.Now().Add(a.pause.Step())
		return a.answer
	}
	if !served {
		a.answer = discovery.ModeDevicePlugin
	} // otherwise the kubelet has yet to register the driver
	a.nextCheck, a.pause = time.Now().Add(ServedInterval()), backoff.NewPause()
	return a.answer
}
