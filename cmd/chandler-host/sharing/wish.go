package sharing

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// The keys of orders, which package nvidia writes.
const (
	gpus      = "gpus"      // UUIDs, separated by commas
	mps       = "mps"       // "true" for an MPS control daemon
	threads   = "threads"   // of MPS: the share of computing for each process, in percent
	memory    = "memory"    // of MPS: the memory of each GPU for each process, in MiB
	timeSlice = "timeSlice" // length of each process's turn on a GPU: 0 to 3, where 0 is the driver's default
)

// settings is a decoded order.
type settings struct {
	gpus      []string
	mps       bool
	threads   int // 0 for no limit
	memory    int // in MiB, 0 for no limit
	timeSlice int // -1 leaves the time slice unchanged
}

var uuidForm = regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

func parse(how map[string]string) (*settings, error) {
	w := &settings{mps: how[mps] == "true", timeSlice: -1}
	var errs []error
	number := func(name string, from, to int) int {
		n, err := strconv.Atoi(how[name])
		if err != nil || n < from || n > to {
			errs = append(errs, fmt.Errorf("%s: is %q; want %d to %d", name, how[name], from, to))
		}
		return n
	}
	for name := range how {
		switch name {
		case gpus, mps:
		case threads:
			w.threads = number(name, 1, 100)
		case memory:
			w.memory = number(name, 1, 1<<30)
		case timeSlice:
			w.timeSlice = number(name, 0, 3)
		default:
			errs = append(errs, fmt.Errorf("%s: is not known", name))
		}
	}
	for gpu := range strings.SplitSeq(how[gpus], ",") {
		if !uuidForm.MatchString(gpu) {
			errs = append(errs, fmt.Errorf("gpus: %q is no UUID", gpu))
		}
		w.gpus = append(w.gpus, gpu)
	}
	if w.mps == (w.timeSlice >= 0) {
		errs = append(errs, errors.New("either MPS or a time slice"))
	}
	return w, errors.Join(errs...)
}
