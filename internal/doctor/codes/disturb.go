package codes

import (
	"regexp"
	"strings"

	"chandler.dev/internal/pattern"
)

// disturbances are patterns of commands that may affect more than the device or component in
// question, with the effects. The first match wins. A command without a match affects no pod.
var disturbances = []struct {
	command func() *regexp.Regexp
	how     string
}{
	{pattern.Lazy(`/(auto_)?reset"?|--gpu-reset|smi reset|hl-smi -r`), "every process that uses the function, its partitions or its virtual functions loses the device"},
	{pattern.Lazy(`/remove"?|/unbind|sriov_numvfs`), "every process that uses the function, its partitions or its virtual functions loses the device"},
	{pattern.Lazy(`modprobe -r|rmmod`), "every process that uses a device of the driver loses the device"},
	{pattern.Lazy(`restart kubelet`), "no pod starts on the node until the kubelet is up; running pods continue"},
	{pattern.Lazy(`systemctl restart (containerd|crio|docker|k3s|rke2\S*|RUNTIME)`), "no container starts on the node until the restart is complete; running containers continue"},
	{pattern.Lazy(`rollout restart daemonset`), "new claims wait until the agent of their node is up; running pods keep their devices"},
	{pattern.Lazy(`kubectl drain|reboot`), "all pods of the node end"},
	{pattern.Lazy(`kubectl .*delete deviceclass`), "new pods whose claims name the class do not start"},
	{pattern.Lazy(`kubectl .*delete resourceslices`), "no pod gets the devices of these slices until their driver publishes them again"},
}

// remark separates a command from a remark for people, which a shell ignores.
const remark = "   # "

// disturbanceOf returns the effect of a command on others, or "".
func disturbanceOf(command string) string {
	command, _, _ = strings.Cut(command, remark)
	for _, d := range disturbances {
		if d.command().MatchString(command) {
			return d.how
		}
	}
	return ""
}

// WithDisturbance adds a remark with the effect on others to a command.
func WithDisturbance(command string) string {
	how := disturbanceOf(command)
	switch {
	case how == "" || strings.Contains(command, how):
		return command
	case strings.Contains(command, remark):
		return command + "; " + how
	}
	return command + remark + how
}
