package facts

import (
	"fmt"

	"chandler.dev/discovery"
	"chandler.dev/internal/pattern"
)

// Forms of the values of a change of a MIG instance. Before R470, the UUID of an instance consists of
// the UUID of the GPU and the numbers of the instance.
var (
	placePattern = pattern.Lazy(`^[1-8]g\.[1-9][0-9]{0,3}gb([+-][a-z]{1,8}(\.[a-z]{1,8})?)?@[0-9]{1,3}$`)
	uuidPattern  = pattern.Lazy(`^MIG-(GPU-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(/[0-9]{1,2}/[0-9]{1,2})?$`)
)

// ChangeArgs returns the arguments of chandler-host for the creation or the removal of a MIG
// instance. It returns an error if the place or the UUID is not that of an instance.
func ChangeArgs(c discovery.PartitionChange) ([]string, error) {
	switch {
	case !placePattern().MatchString(c.Place):
		return nil, fmt.Errorf("%.64q is not the place of a MIG instance", c.Place)
	case c.UUID != "" && (!c.Remove || !uuidPattern().MatchString(c.UUID)):
		return nil, fmt.Errorf("%.64q is not the UUID of a MIG instance to remove", c.UUID)
	}
	args := []string{"--gpu=" + c.Function, "--create=" + c.Place}
	if c.Remove {
		args[1] = "--remove=" + c.Place
	}
	if c.UUID != "" {
		args = append(args, "--uuid="+c.UUID)
	}
	if c.HasBegun {
		args = append(args, "--begun")
	}
	return args, nil
}
