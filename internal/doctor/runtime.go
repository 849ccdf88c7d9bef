package doctor

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/version"

	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
)

var runtimeChecks = []check{
	{codes.Runtime, []string{"CH0201", "CH0202", "CH0203", "CH0208"}, checkRuntime},
	{codes.Runtime, []string{"CH0205"}, checkSpecDir},
	{codes.Runtime, []string{"CH0204", "CH0206"}, checkSpecs},
	{codes.Runtime, []string{"CH0207"}, checkSpecErrors},
}

// firstCDI are the first versions of runtimes that support CDI specs. containerd 1.7 requires
// enable_cdi; CDI is on by default since 2.0 (docs/cri/config.md), and always on since 2.4
// (RELEASES.md; plugins/cri/runtime/plugin.go, read in 2.4.2).
var firstCDI = map[string]*version.Version{
	"containerd": version.MajorMinor(1, 7),
	"cri-o":      version.MajorMinor(1, 23),
}

// IsBeforeCDI reports whether a version of a container runtime does not support CDI specs.
func IsBeforeCDI(name string, v *version.Version) bool {
	return firstCDI[name] != nil && v.LessThan(firstCDI[name])
}

// startSlack is the tolerance for a process's start time, which is computed from whole
// seconds, as is the boot time.
const startSlack = 5 * time.Second

func checkRuntime(f *Facts, say *report.List) {
	r := f.Runtime
	name := strings.TrimSpace(r.Name + " " + r.Version)
	if v, err := version.ParseGeneric(r.Version); err == nil && IsBeforeCDI(r.Name, v) {
		say.AddFault("CH0201", name+" is too old for CDI", fmt.Sprintf("%s supports CDI specs from %s on. Pods with a claim start without their devices.", r.Name, firstCDI[r.Name]),
			"kubectl drain "+f.Node+" --ignore-daemonsets   # then upgrade "+r.Name, "kubectl label node "+f.Node+" chandler.dev/mode=DevicePlugin --overwrite   # until then")
		return
	}
	config, known := r.Config.get()
	if !known {
		say.AddSkipped("whether CDI is on: %s", r.Config.unknownReason())
		return
	}
	if name == "" {
		name = "the container runtime"
	}
	file := "/etc/containerd/config.toml"
	if len(config.Files) > 0 {
		file = config.Files[len(config.Files)-1]
	}
	unit := r.Name
	if unit == "cri-o" {
		unit = "crio"
	}
	restart := "sudo systemctl restart " + unit
	switch {
	case !config.CDI:
		fix := []string{fmt.Sprintf("sudo sed -i 's/enable_cdi = false/enable_cdi = true/' %s", file), restart}
		cause := fmt.Sprintf("enable_cdi is not true in %s. Pods with a claim start without their devices.", file)
		if r.Version == "" {
			cause += fmt.Sprintf(" The version of %s is unknown here. From containerd 2.4 on CDI is always on, and that line has no effect.", r.Name)
			fix = append([]string{"containerd --version"}, fix...)
		}
		say.AddFault("CH0202", name+" does not read CDI specs", cause, fix...)
	case !slices.ContainsFunc(config.SpecDirs, func(dir string) bool { return sameDir(dir, r.Dir) }):
		say.AddFault("CH0203", fmt.Sprintf("%s does not read %s", name, r.Dir), fmt.Sprintf("It reads %s. The agent writes the specs of claims to another directory.", report.JoinNames(config.SpecDirs)),
			fmt.Sprintf("sudo sed -i 's|cdi_spec_dirs = .*|cdi_spec_dirs = [\"/etc/cdi\", %q]|' %s", r.Dir, file), restart)
	case !config.Started.IsZero() && config.Changed.After(config.Started.Add(startSlack)):
		say.AddFault("CH0208", name+" still uses an older configuration", fmt.Sprintf("%s changed at %s, and %s has run since %s.", file, config.Changed.UTC().Format("2006-01-02 15:04"), r.Name, config.Started.UTC().Format("2006-01-02 15:04")), restart)
	default:
		say.AddOK("%s: CDI is on, with the directories %s", name, report.JoinNames(config.SpecDirs))
	}
}

// sameDir reports whether two paths are the same directory, given that /var/run is a link to
// /run.
func sameDir(a, b string) bool {
	clean := func(dir string) string { return strings.Replace(path.Clean(dir), "/var/run/", "/run/", 1) }
	return clean(a) == clean(b)
}

func checkSpecDir(f *Facts, say *report.List) {
	if why, known := f.Runtime.Writable.get(); known && why != "" {
		say.AddFault("CH0205", "the directory for CDI specs is not writable", asSentence(why)+" No claim is prepared.",
			"sudo mkdir -p "+f.Runtime.Dir, "findmnt -T "+f.Runtime.Dir)
	}
}

// checkSpecs compares the CDI specs of claims with the records.
func checkSpecs(f *Facts, say *report.List) {
	specs, known := f.Runtime.Specs.get()
	records, read := f.Agent.Records.get()
	if !known || !read {
		why := f.Runtime.Specs.unknownReason()
		if known {
			why = f.Agent.Records.unknownReason()
		}
		say.AddSkipped("whether each CDI spec belongs to a claim: %s", why)
		return
	}
	before := len(say.Findings)
	there, claimed := make(map[string]bool), make(map[string]bool)
	for _, s := range specs {
		there[s.UID] = true
	}
	for _, r := range records.Claims {
		claimed[r.UID] = true
		if !there[r.UID] && !r.Past {
			text, cause := fmt.Sprintf("the CDI spec of claim %s/%s is missing", r.Namespace, r.Name), "The claim is prepared, but its spec is not in "+f.Runtime.Dir+". A container that starts now does not get its devices."
			if code, dir := f.fullDisk(); code != "" {
				say.AddFault("CH0206", text, fmt.Sprintf("%s The disk with %s is full: free space first (%s). Then a running agent writes the spec again within 30 s.", cause, dir, code), "chandler explain "+code)
				say.SetFollows(code)
				continue
			}
			say.AddFault("CH0206", text, cause+" A running agent writes it again within 30 s.", "kubectl -n chandler rollout restart daemonset chandler")
		}
	}
	sealed := strings.Join(records.SetAside, " ")
	for _, s := range specs {
		if !claimed[s.UID] && !strings.Contains(sealed, s.UID) {
			say.AddFault("CH0204", "a CDI spec remains for a claim that has ended", fmt.Sprintf("%s belongs to the claim with UID %s, which has no record. An agent that starts now does not allocate the devices of the spec until it has checked with the kubelet and the API server, for about five minutes.", s.File, s.UID),
				"kubectl get resourceclaims -A -o jsonpath='{range .items[*]}{.metadata.uid} {.metadata.namespace}/{.metadata.name}{\"\\n\"}{end}' | grep "+s.UID+"   # if there is no such claim:", "sudo rm "+s.File)
		}
	}
	if say.NoFaultSince(before) {
		say.AddOK("every CDI spec belongs to a claim")
	}
}

func checkSpecErrors(f *Facts, say *report.List) {
	for _, file := range slices.Sorted(maps.Keys(f.Runtime.Errors)) {
		say.AddFault("CH0207", path.Base(file)+" is not a valid CDI spec", asSentence(strings.Join(f.Runtime.Errors[file], "; "))+" Runtimes ignore it, and devices that other specs define as well.",
			"sudo cat "+file, "sudo mv "+file+" /root/")
	}
}
