package nvidia

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// A claim may ask for a control daemon of MPS that is its own, with a limit of the memory of each
// GPU that each process may use, in MiB, and for the time slice of its GPUs: Default, Short,
// Medium or Long. chandler-nvml keeps both up, with --upkeep; its package upkeep reads the
// orders.
const (
	MPS       discovery.Parameter = "mps"
	MPSMemory discovery.Parameter = "mps.memoryMiB"
	TimeSlice discovery.Parameter = "timeSlice"
)

// timeSlices are the words for time slices, as nvidia-smi numbers them.
var timeSlices = []string{"Default", "Short", "Medium", "Long"}

// The words of orders.
const (
	orderGPUs      = "gpus"
	orderMPS       = "mps"
	orderThreads   = "threads"
	orderMemory    = "memory"
	orderTimeSlice = "timeSlice"
)

// allowed is the fact by which a GPU says what the administrator lets be kept up for it.
const allowed = "upkeep"

func (d *driver) setAllowed(gpu *discovery.Device) {
	var kinds []string
	for _, kind := range []discovery.UpkeepKind{discovery.UpkeepMPS, discovery.UpkeepTimeSlices} {
		if is, err := d.host.Keeps(*gpu, kind); is && err == nil && gpu.Facts != nil {
			kinds = append(kinds, string(kind))
		}
	}
	if len(kinds) > 0 {
		gpu.Facts[allowed] = strings.Join(kinds, ",")
	}
}

// acceptUpkeep returns why GPUs cannot be given with a daemon or a time slice.
func acceptUpkeep(given []discovery.Device, parameters discovery.Parameters) (errs []error) {
	mps, slice := parameters[MPS] != "", parameters[TimeSlice] != ""
	if mps && slice {
		errs = append(errs, fmt.Errorf("%s: with %s programs compute at the same time, and have no turns", TimeSlice, MPS))
	}
	for _, asked := range []struct {
		parameter discovery.Parameter
		kind      discovery.UpkeepKind
	}{{MPS, discovery.UpkeepMPS}, {TimeSlice, discovery.UpkeepTimeSlices}} {
		parameter, kind := asked.parameter, asked.kind
		if parameters[parameter] == "" {
			continue
		}
		for _, d := range given {
			switch {
			case !slices.Contains(strings.Split(d.Facts[allowed], ","), string(kind)):
				errs = append(errs, fmt.Errorf("%s: device %s is no whole GPU for which the administrator allows it, by onRequest.%s", parameter, d.Name, kind))
			case d.Identity == "":
				errs = append(errs, fmt.Errorf("%s: the UUID of device %s is not known yet", parameter, d.Name))
			case mps && usesMPS(d):
				errs = append(errs, fmt.Errorf("%s: device %s is shared, and used by the daemon of roots[%s]", parameter, d.Name, mpsRoot))
			}
		}
	}
	return errs
}

// order returns what chandler-nvml is to keep up for the GPUs of a request.
func order(given []discovery.Device, parameters discovery.Parameters) map[string]string {
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

// daemonPipes is where a container has the pipes of the claim's daemon, as NVIDIA's DRA driver has
// them.
const daemonPipes = "/tmp/nvidia-mps"

// daemonEdits are what a container needs to use GPUs by the daemon of its claim.
func daemonEdits(to discovery.Grant) (edits specs.ContainerEdits) {
	if to.Parameters[MPS] == "" || to.Upkeep == "" {
		return edits
	}
	dir := to.UpkeepDir(name)
	edits.Env = []string{pipeDirectory + "=" + daemonPipes}
	edits.Mounts = []*specs.Mount{writable(path.Join(dir, "pipe"), daemonPipes), writable(path.Join(dir, "shm"), sharedMemory)}
	return edits
}
