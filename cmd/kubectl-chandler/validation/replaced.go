package validation

import (
	"fmt"
	"strings"

	"chandler.dev/cmd/kubectl-chandler/replaced"
)

// warnReplacedClass warns about a request for the class of a driver that Chandler replaces.
func (v *validator) warnReplacedClass(at place, value any) {
	name, _ := value.(string)
	class := replaced.Classes[name]
	own := class.Own
	if own == "" {
		return
	}
	var more []string
	if class.CEL != "" {
		more = append(more, "the selector "+class.CEL)
	}
	if class.VFIO {
		more = append(more, "the parameter driver: vfio")
	}
	if len(more) > 0 {
		own += " with " + strings.Join(more, " and ")
	}
	v.addFindings(at, severityWarning, fmt.Errorf("%s is the class of a driver that Chandler replaces; the class of Chandler is %s", name, own))
}

// warnReplacedDriver warns about the name of a driver that Chandler replaces.
func (v *validator) warnReplacedDriver(at place, name string) {
	if d := replaced.DriverOf(name); d != nil && d.Unserved == "" {
		v.addFindings(at, severityWarning, fmt.Errorf("%s is a driver that Chandler replaces; kubectl chandler import translates objects for it", name))
	}
}
