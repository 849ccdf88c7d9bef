package doctor

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
)

var agentChecks = []check{
	{codes.Agent, []string{"CH0701", "CH0706"}, checkAgentRuns},
	{codes.Agent, []string{"CH0708"}, checkInstallations},
	{codes.Agent, []string{"CH0703"}, checkConfig},
	{codes.Agent, []string{"CH0702", "CH0704", "CH0707"}, checkRecords},
	{codes.Agent, []string{"CH0705"}, checkAgentVersion},
	{codes.Agent, []string{"CH0709"}, checkVisibility},
	{codes.Agent, []string{"CH0710"}, checkOutdated},
}

func checkAgentRuns(f *Facts, say *report.List) {
	defer f.reportOtherAgents(say)
	pod, asked := f.Agent.Pod.get()
	running, looked := f.Agent.Running.get()
	ready, answered := f.Agent.Ready.get()
	live, lives := f.Agent.Live.get()
	logs := "kubectl -n chandler logs daemonset/chandler --tail=50"
	name := "the agent"
	if pod != nil {
		name, logs = pod.Name, fmt.Sprintf("kubectl -n %s logs %s --tail=50", pod.Namespace, pod.Name)
		f.reportRestarts(say, pod)
	}
	switch {
	case !answered && f.Agent.Local:
		say.AddFault("CH0701", name+" does not respond", asSentence(f.Agent.Ready.unknownReason())+" The kubelet restarts the agent if this continues.", logs)
	case answered && ready != "" && f.Agent.Unready != UnreadyConfig: // checkConfig reports the configuration
		say.AddFault("CH0701", name+" is not ready", asSentence(ready), logs)
	case lives && live != "":
		say.AddFault("CH0701", name+" does not respond to the kubelet", asSentence(live)+" The kubelet restarts the agent.", logs)
	case f.Agent.Unready == UnreadyConfig:
		say.AddOK("the agent runs")
	case answered && ready == "":
		since := ""
		if pod != nil && pod.Status.StartTime != nil {
			since = lastingText(pod.Status.StartTime.Time, f.Time)
		}
		say.AddOK("%s is ready%s", name, since)
	case asked && pod == nil && (!looked || !running):
		say.AddFault("CH0701", "no agent runs on this node", "The API server has no agent pod for this node. A taint, a node selector or pod security may prevent it.",
			"kubectl -n chandler describe daemonset chandler", "kubectl -n chandler get events --sort-by=.lastTimestamp | tail -n 20")
	case pod != nil && !podReady(pod):
		say.AddFault("CH0701", name+" is not ready", asSentence(podReason(pod)), fmt.Sprintf("kubectl -n %s describe pod %s", pod.Namespace, pod.Name), logs)
	case pod != nil:
		say.AddOK("%s is ready%s", name, lastingText(pod.CreationTimestamp.Time, f.Time))
	case looked && !running:
		say.AddFault("CH0701", "no agent runs on this node", "No process of the agent exists.", "kubectl -n chandler get pods -o wide", "kubectl -n chandler describe daemonset chandler")
	case looked:
		say.AddOK("the agent runs")
	default:
		say.AddSkipped("whether the agent runs: %s", f.Agent.Running.unknownReason())
	}
}

// takeover is how long an agent may be unready beside a ready agent before checkAgentRuns
// reports the agent.
const takeover = time.Minute

// isStuck reports whether another agent should have taken over from the ready agent.
func (f *Facts) isStuck(other OtherAgent) bool {
	return !other.Foreign && !podReady(other.Pod) && f.Time.Sub(other.Pod.CreationTimestamp.Time) >= takeover
}

// reportOtherAgents reports the agents that cannot take over from the ready agent.
func (f *Facts) reportOtherAgents(say *report.List) {
	for _, other := range f.Agent.OtherAgents {
		pod := other.Pod
		if !f.isStuck(other) || other.Unready == UnreadyConfig { // checkConfig reports the configuration
			continue
		}
		why := other.Why
		if why == "" {
			why = podReason(pod)
		}
		cause := asSentence(why) + " This agent should take over."
		if first := f.Agent.Pod.Value; first != nil && podReady(first) {
			cause += fmt.Sprintf(" Until then, %s continues, and the update waits.", first.Name)
		}
		say.AddFault("CH0701", fmt.Sprintf("two agents are on this node, and %s is not ready%s", pod.Name, lastingText(pod.CreationTimestamp.Time, f.Time)),
			cause, fmt.Sprintf("kubectl -n %s logs %s --tail=50", pod.Namespace, pod.Name), fmt.Sprintf("kubectl -n %s describe pod %s", pod.Namespace, pod.Name))
	}
}

// checkInstallations reports a node with agents of several installations. Two agents of the
// same installation are on a node during an update only.
func checkInstallations(f *Facts, say *report.List) {
	cause := "Only one agent is active at a time, and the others wait. When it restarts, an agent of another installation may become active, with another configuration."
	var others []*corev1.Pod
	for _, other := range f.Agent.OtherAgents {
		if other.Foreign {
			others = append(others, other.Pod)
		}
	}
	const find = "kubectl get daemonsets -A -l app.kubernetes.io/name=chandler   # keep one, or use node selectors that exclude each other"
	if first := f.Agent.Pod.Value; first != nil && len(others) > 0 {
		pods, fix := []string{first.Namespace + "/" + first.Name}, []string{find}
		for _, pod := range append([]*corev1.Pod{first}, others...) {
			fix = append(fix, fmt.Sprintf("kubectl -n %s describe pod %s", pod.Namespace, pod.Name))
		}
		for _, pod := range others {
			pods = append(pods, pod.Namespace+"/"+pod.Name)
		}
		say.AddFault("CH0708", "this node has agents of different installations", report.JoinNames(pods)+" belong to different installations. "+cause, fix...)
		return
	}
	if names := f.Agent.Installations; len(names) > 1 {
		say.AddFault("CH0708", "this node has agents of different installations", "They belong to the DaemonSets "+report.JoinNames(names)+". "+cause, find)
	}
}

func podReady(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// podReason returns the reason why a pod is not ready.
func podReason(pod *corev1.Pod) string {
	for _, c := range pod.Status.ContainerStatuses {
		switch {
		case c.State.Waiting != nil:
			return strings.TrimSpace(c.State.Waiting.Reason + ": " + c.State.Waiting.Message)
		case c.State.Terminated != nil:
			return strings.TrimSpace(c.State.Terminated.Reason + ": " + c.State.Terminated.Message)
		}
	}
	for _, c := range pod.Status.Conditions {
		if c.Status != corev1.ConditionTrue && c.Message != "" {
			return c.Message
		}
	}
	return "its pod is " + string(pod.Status.Phase)
}

// manyRestarts is the threshold for a report of an agent's restarts.
const manyRestarts = 5

func (f *Facts) reportRestarts(say *report.List, pod *corev1.Pod) {
	for _, c := range pod.Status.ContainerStatuses {
		if c.RestartCount < manyRestarts {
			continue
		}
		why := "The reason is unknown."
		if last := c.LastTerminationState.Terminated; last != nil {
			why = fmt.Sprintf("Its last exit was %s, code %d: %s", last.Reason, last.ExitCode, asSentence(last.Message))
		}
		say.AddFault("CH0706", fmt.Sprintf("the agent was restarted %d times", c.RestartCount), why+" Pods that have devices continue.",
			fmt.Sprintf("kubectl -n %s logs %s --previous --tail=50", pod.Namespace, pod.Name), fmt.Sprintf("kubectl -n %s describe pod %s", pod.Namespace, pod.Name))
	}
}

func checkConfig(f *Facts, say *report.List) {
	why, known := f.Agent.Config.get()
	if f.Agent.Unready == UnreadyConfig && why == "" {
		why, known = f.Agent.Ready.Value, true
	}
	effect := " The last valid configuration remains in effect."
	isNext := func(other OtherAgent) bool { return other.Unready == UnreadyConfig && f.isStuck(other) }
	if i := slices.IndexFunc(f.Agent.OtherAgents, isNext); i >= 0 {
		next := f.Agent.OtherAgents[i]
		if why == "" {
			why, known = next.Why, true
		}
		effect += fmt.Sprintf(" The agent %s does not become ready, and the update waits.", next.Pod.Name)
	}
	fixes := append([]string{"kubectl -n chandler get configmap chandler -o jsonpath='{.data.config\\.yaml}' | kubectl chandler validate -"},
		codes.ConfigFixes("correct the error")...)
	switch {
	case !known:
		say.AddSkipped("the configuration: %s", f.Agent.Config.unknownReason())
	case why != "":
		say.AddFault("CH0703", "the configuration is invalid", asSentence(strings.ReplaceAll(why, "\n", "; "))+effect, fixes...)
	case f.Agent.Refused:
		say.AddFault("CH0703", "the changed configuration is invalid", "The agent rejected it, and the previous one remains in effect. The error is not visible from here: the command prints it.", fixes...)
	default:
		say.AddOK("the configuration is valid")
	}
}

func checkRecords(f *Facts, say *report.List) {
	records, known := f.Agent.Records.get()
	if !known {
		say.AddSkipped("the agent's records: %s", f.Agent.Records.unknownReason())
		return
	}
	before := len(say.Findings)
	for _, file := range records.SetAside {
		if slices.Contains(records.Newer, file) {
			continue // the finding for newer records is more specific
		}
		uid, _, _ := strings.Cut(path.Base(file), ".")
		fix := []string{"sudo cat " + file}
		cause := "The file is damaged, or incomplete after a loss of power. Its devices are not allocated until the claim is unprepared. If no claim and no pod has this UID any more, the agent releases the devices about five minutes after its start."
		if strings.HasSuffix(file, ".unreadable") {
			cause = "The agent could not read the file and continues without it. No device is allocated twice because of this."
			fix = append(fix, "sudo rm "+file)
		} else {
			fix = append(fix, fmt.Sprintf("kubectl get resourceclaims -A -o jsonpath='{range .items[?(@.metadata.uid==%q)]}{.metadata.namespace}/{.metadata.name} {.status.reservedFor[*].name}{end}'   # delete the pods in reservedFor", uid))
		}
		say.AddFault("CH0702", "the record "+path.Base(file)+" is set aside", cause, fix...)
	}
	for _, file := range records.Newer {
		say.AddFault("CH0704", "the record "+path.Base(file)+" is from a newer agent", "An agent of this version must not act on the record. It does not allocate the devices in the record, and does not unprepare the claim.",
			"helm rollback chandler --namespace chandler   # back to the newer version, if you installed the chart", "kubectl -n chandler rollout undo daemonset chandler   # with the plain manifests")
	}
	for _, what := range records.Unread {
		say.AddFault("CH0707", "a record of the agent cannot be read", asSentence(what)+" The devices in the record are not allocated.",
			"sudo dmesg | tail -n 50   # the disk may have failed", "kubectl -n chandler logs daemonset/chandler --tail=50")
	}
	if say.NoFaultSince(before) {
		given := 0
		for _, c := range records.Claims {
			if !c.Past {
				given++
			}
		}
		say.AddOK("%s prepared, %s allocated by the device plugin API, no record set aside", report.CountNoun(given, "claim"), report.CountNoun(records.Grants, "ID"))
	}
}

func checkAgentVersion(f *Facts, say *report.List) {
	if v := f.Agent.Version; v != "" && v != f.Version {
		say.AddFault("CH0705", fmt.Sprintf("the agent has version %s, and this program %s", v, f.Version), "The versions may use different files on the node, so these results may not apply to the agent.",
			"kubectl -n chandler exec daemonset/chandler -- /chandler doctor --host-root=/host")
	}
}

// blindness is the effect on a part of the configuration if the agent cannot see open device
// files.
type blindness struct {
	then  string
	value string // the chart value that runs the host service
}

// blinds maps parts of the configuration to the effects. The agent changes no device unless it
// sees that the device is unused. In contrast, an unknown consumer delays reclaim for a limited
// time only.
var blinds = map[string]blindness{
	"reclaim":                   {"A device is withheld only as long as containers of the previous pod may run, and not at all in the device plugin API.", "reclaim.enabled"},
	"passthrough":               {"No function is bound to vfio, and pods that request passthrough do not start.", "passthrough.enabled"},
	"onDemand.virtualFunctions": {"No virtual functions are created, and pods that get one do not start.", "onDemand.enabled"},
}

// checkVisibility reports whether the agent can see open device files, if the configuration
// requires that. Reclaim requires the open files of the pods' processes. A change of a device
// requires those of all processes of the machine; on a node that is a container, the agent
// does not see the latter.
func checkVisibility(f *Facts, say *report.List) {
	reclaiming, changing := split(f.Agent.NeedsVisibility)
	if f.Agent.Visibility == f.Agent.VisibilityAll {
		reclaiming, changing = f.Agent.NeedsVisibility, nil
	}
	judgeVisibility(reclaiming, f.Agent.Visibility, "the agent can determine which devices pods have open", visibilityFixes, say)
	judgeVisibility(changing, f.Agent.VisibilityAll, "the agent can determine which devices any process has open", func(looking []string) []string {
		if why, known := f.Agent.Visibility.get(); why == "" && known { // more permissions would not help
			return codes.ConfigFixes("remove " + report.JoinNames(looking) + " for this node, which is a container")
		}
		return visibilityFixes(looking)
	}, say)
}

// split separates the parts of the configuration for reclaim from those that change devices.
func split(looking []string) (reclaiming, changing []string) {
	for _, part := range looking {
		if part == "reclaim" {
			reclaiming = append(reclaiming, part)
		} else {
			changing = append(changing, part)
		}
	}
	return reclaiming, changing
}

// judgeVisibility reports whether an agent can see the open files that parts of the configuration
// require.
func judgeVisibility(looking []string, visibility Answer[string], well string, fixes func([]string) []string, say *report.List) {
	if len(looking) == 0 {
		return
	}
	switch why, known := visibility.get(); {
	case !known:
		say.AddSkipped("whether the agent can determine which devices are open: %s", visibility.unknownReason())
	case why != "":
		causes := []string{asSentence(why)}
		for _, part := range looking {
			causes = append(causes, blinds[part].then)
		}
		say.AddFault("CH0709", "the agent cannot determine which devices are open, for "+report.JoinNames(looking), strings.Join(causes, " "), fixes(looking)...)
	default:
		say.AddOK("%s", well)
	}
}

// visibilityFixes returns commands that run the host service, which sees open files.
func visibilityFixes(looking []string) []string {
	var sets []string
	for _, part := range looking {
		sets = append(sets, "--set "+blinds[part].value+"=true")
	}
	const plain = "   # with the plain manifests"
	return []string{codes.HelmSet + " " + strings.Join(sets, " "), codes.ApplyHostService + plain, codes.UseHostService + plain}
}

// checkOutdated reports a configuration change that takes effect at the agent's next start
// only.
func checkOutdated(f *Facts, say *report.List) {
	if f.Agent.Outdated {
		say.AddFault("CH0710", "a configuration change requires a restart of the agent", "The agent reads some fields only when it starts, such as passthrough and onDemand. Its log and its web UI name the changed fields.",
			"kubectl -n chandler rollout restart daemonset chandler   # pods keep their devices")
	}
}
