package driver

import (
	"context"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
)

// writeFiles writes the files of the host that go with what a claim has. Where
// nobody made their directory nobody reads them either, and they are left out.
func (d *Driver) writeFiles(ctx context.Context, r *record) error {
	files := r.files()
	if len(files) == 0 {
		return nil
	}
	d.filing.Lock()
	defer d.filing.Unlock()
	unwritten, err := d.config.HostFiles.Write(files)
	if len(unwritten) > 0 {
		klog.FromContext(ctx).V(2).Info("Host files are not written, since nobody made their directory", "claim", klog.KRef(r.Namespace, r.Name), "files", unwritten)
	}
	return err
}

// removeFiles removes the files of the host that go with what the record says
// and with nothing that another claim has, or that is to be kept, and then lets
// forget do its work: of two claims that end at once and have one file, the
// second sees that the first is gone.
func (d *Driver) removeFiles(r, keep *record, forget func() error) error {
	files := r.files()
	if len(files) == 0 {
		return forget()
	}
	d.filing.Lock()
	defer d.filing.Unlock()
	kept := append(d.store.filesOfOthers(r), keep.files()...)
	var gone []string
	for _, f := range files {
		if !slices.ContainsFunc(kept, func(other discovery.HostFile) bool { return other.Path == f.Path }) {
			gone = append(gone, f.Path)
		}
	}
	if err := d.config.HostFiles.Remove(gone); err != nil {
		return err
	}
	return forget()
}

// filesOf returns the files of the host that go with a device.
func filesOf(device *discovery.Device) (files []hostFile) {
	for _, f := range device.FilesAs(device.Resource()) {
		files = append(files, hostFile(f))
	}
	return files
}

// filesOfOthers returns the files of the host that go with what other claims
// have of the same silicon.
func (s *store) filesOfOthers(r *record) []discovery.HostFile {
	s.mu.Lock()
	defer s.mu.Unlock()
	var files []discovery.HostFile
	seen := map[types.UID]bool{r.UID: true}
	for _, result := range r.Results {
		for uid := range s.silicon[result.Silicon] {
			if !seen[uid] {
				seen[uid] = true
				files = append(files, s.claims[uid].files()...)
			}
		}
	}
	return files
}
