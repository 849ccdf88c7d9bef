package compile

import (
	"k8s.io/apimachinery/pkg/util/validation/field"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/discovery/families/idxd"
	"chandler.dev/discovery/families/qat"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/provision"
)

// Provision decodes and checks a configuration, and compiles its expressions.
func Provision(data []byte) ([]provision.Rule, error) {
	config, err := v1alpha1.ParseProvisionConfig(data)
	if err != nil {
		return nil, err
	}
	out := make([]provision.Rule, len(config.Functions))
	var errs field.ErrorList
	for i, f := range config.Functions {
		selector, err := rules.Compile(f.CEL)
		if err != nil {
			errs = append(errs, v1alpha1.InvalidField(field.NewPath("functions").Index(i).Child("cel"), "%v", err)...)
		}
		out[i] = provision.Rule{Selects: selector.SelectsDevice, Driver: f.Driver, Settings: settings(f)}
		if f.VirtualFunctions != nil {
			out[i].VFs = &provision.VFs{Count: f.VirtualFunctions.Count, Driver: f.VirtualFunctions.Driver}
		}
	}
	return out, v1alpha1.JoinErrors(errs)
}

// settings returns the settings of a function that only its family can apply, nil if there are
// none.
func settings(f v1alpha1.Function) any {
	if len(f.Services) > 0 {
		return qat.Services(f.Services)
	}
	if len(f.WorkQueueGroups) == 0 {
		return nil
	}
	var groups idxd.Groups
	for _, group := range f.WorkQueueGroups {
		g := idxd.Group{Engines: group.Engines}
		for _, q := range group.WorkQueues {
			g.Queues = append(g.Queues, idxd.Queue{
				Name:      q.Name,
				Shared:    q.Mode == v1alpha1.WorkQueueShared,
				Size:      q.Size,
				Priority:  q.Priority,
				Threshold: q.Threshold,
			})
		}
		groups = append(groups, g)
	}
	return groups
}
