package nvidia

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// These parameters request a control daemon of MPS for one claim, with a limit in MiB for the
// memory of each GPU that each process may use, and the time slice of the claim's GPUs: Default,
// Short, Medium or Long. chandler-host --sharing-daemons provides both; its package sharing reads
// the orders.
const (
	MPS       discovery.Parameter = "mps"
	MPSMemory discovery.Parameter = "mps.memoryMiB"
	TimeSlice discovery.Parameter = "timeSlice"
)

// timeSlices are the names of time slices. The index of each is its number in nvidia-smi.
var timeSlices = []string{"Default", "Short", "Medium", "Long"}

// These constants are the keys of orders.
const (
	orderGPUs      = "gpus"
	orderMPS       = "mps"
	orderThreads   = "threads"
	orderMemory    = "memory"
	orderTimeSlice = "timeSlice"
)

// allowed is the fact that lists the kinds of sharing daemons that the administrator allows for a
// GPU.
const allowed = "sharingDaemons"

func (d *driver) setAllowed(gpu *discovery.Device) {
	var kinds []string
	for _, kind := range []discovery.SharingDaemonKind{discovery.SharingDaemonMPS, discovery.SharingDaemonTimeSlices} {
		if is, err := discovery.IsSelected(d.host.SharingDaemons[kind], *gpu); is && err == nil && gpu.Facts != nil {
			kinds = append(kinds, string(kind))
		}
	}
	if len(kinds) > 0 {
		gpu.Facts[allowed] = strings.Join(kinds, ",")
	}
}

// acceptDaemons returns the reasons why GPUs cannot be allocated with a daemon or a time slice.
func acceptDaemons(given []discovery.Device, parameters discovery.Parameters) (errs []error) {
	mps, slice := parameters[MPS] != "", parameters[TimeSlice] != ""
	if mps && slice {
		errs = append(errs, fmt.Errorf("%s: cannot be combined with %s", TimeSlice, MPS))
	}
	for _, asked := range []struct {
		parameter discovery.Parameter
		kind      discovery.SharingDaemonKind
	}{{MPS, discovery.SharingDaemonMPS}, {TimeSlice, discovery.SharingDaemonTimeSlices}} {
		parameter, kind := asked.parameter, asked.kind
		if parameters[parameter] == "" {
			continue
		}
		for _, d := range given {
			switch {
			case !slices.Contains(strings.Split(d.Facts[allowed], ","), string(kind)):
				errs = append(errs, fmt.Errorf("%s: device %s is not a whole GPU that the configuration selects by onDemand.%s", parameter, d.Name, kind))
			case d.Identity == "":
				errs = append(errs, fmt.Errorf("%s: the UUID of device %s is not known yet", parameter, d.Name))
			case mps && usesMPS(d):
				errs = append(errs, fmt.Errorf("%s: device %s is shared, and used by the daemon of driverRoots[%s]", parameter, d.Name, mpsRoot))
			}
		}
	}
	return errs
}

// daemonOrder returns the order for chandler-host for the GPUs of a request.
func daemonOrder(given []discovery.Device, parameters discovery.Parameters) map[string]string {
	var uuids []string
	for _, d := range given {
		uuids = append(uuids, d.Identity)
	}
	slices.Sort(uuids)
	how := map[string]string{orderGPUs: strings.Join(slices.Compact(uuids), ",")}
	switch {
	case parameters[MPS] != "":
		how[orderMPS] = "true"
		if limit := parameters[ComputePercentage]; limit != "" {
			how[orderThreads] = limit
		}
		if limit := parameters[MPSMemory]; limit != "" {
			how[orderMemory] = limit
		}
	case parameters[TimeSlice] != "":
		how[orderTimeSlice] = fmt.Sprint(slices.Index(timeSlices, parameters[TimeSlice]))
	default:
		return nil
	}
	return how
}

// daemonPipes is the container path of the pipes of the claim's daemon, as in the NVIDIA DRA
// driver.
const daemonPipes = "/tmp/nvidia-mps"

// daemonEdits returns the edits for containers that use GPUs through the claim's daemon.
func daemonEdits(to discovery.Grant) (edits specs.ContainerEdits) {
	if to.Parameters[MPS] == "" || to.SharingDir == "" {
		return edits
	}
	dir := to.DaemonDir(name)
	edits.Env = []string{pipeDirectory + "=" + daemonPipes}
	edits.Mounts = []*specs.Mount{writableMount(path.Join(dir, "pipe"), daemonPipes), writableMount(path.Join(dir, "shm"), sharedMemory)}
	return edits
}
