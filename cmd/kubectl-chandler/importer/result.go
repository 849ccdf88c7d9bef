package importer

import (
	"slices"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/notes"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
)

// A Result is a configuration and the translated objects of DRA drivers, with notes.
type Result struct {
	Config  *v1alpha1.DriverConfig // nil if the files contain no configuration of a device plugin
	Formats []string               // the names of the formats in the files
	Notes   []notes.Note

	// Provision is the configuration for "chandler provision" that replaces what a plugin does with
	// PCI functions, without functions if there is nothing to do.
	Provision *v1alpha1.ProvisionConfig

	origins map[string][]string
	objects []plugin.Object
}

// ChangedPods returns the number of settings with a change for pods. A setting can have several
// notes.
func (r *Result) ChangedPods() int { return notes.CountPodChanges(r.Notes) }

func (im *importer) result() *Result {
	result := &Result{Provision: &im.Config.Provision, origins: im.Config.Origins, objects: im.Objects}
	if im.hasPlugin() {
		result.Config = &im.Config.Driver
	}
	for _, f := range im.Formats {
		if im.Found[f.Name] && !slices.Contains(result.Formats, f.Name) {
			result.Formats = append(result.Formats, f.Name)
		}
	}
	result.Notes = im.Notes.Sorted()
	return result
}
