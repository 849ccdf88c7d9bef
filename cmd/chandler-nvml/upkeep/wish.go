package upkeep

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// The words of orders; package nvidia writes them.
const (
	gpus      = "gpus"      // UUIDs, with commas between them
	mps       = "mps"       // "true": the claim has a control daemon of MPS
	threads   = "threads"   // of MPS: the share of computing that each process may use, in percent
	memory    = "memory"    // of MPS: the memory of each GPU that each process may use, in MiB
	timeSlice = "timeSlice" // how long one process computes before the next has its turn: 0 to 3, of which 0 is the driver's own
)

// wish is an order that was understood.
type wish struct {
	gpus      []string
	mps       bool
	threads   int // 0 for no limit
	memory    int // in MiB, likewise
	timeSlice int // -1 if it is left as it is
}

var uuidForm = regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

func parse(how map[string]string) (*wish, error) {
	w := &wish{mps: how[mps] == "true", timeSlice: -1}
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
