package gather

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"chandler.dev/internal/doctor"
	"chandler.dev/internal/hostservice"
	"chandler.dev/internal/inuse"
)

// visibility returns two reasons why the agent cannot see open files: those of the pods' processes,
// and those of all processes of the machine. A reason is "" if the agent sees these files. In
// the agent's pod, visibility tries to look at open files. An agent with a host service sees what the
// service sees. On the node, doctor may have more
// permissions than the agent, so visibility checks the capabilities and mounts of the agent's
// process.
func visibility(ctx context.Context, o Options, agents []process) (ofPods, ofAll doctor.Answer[string]) {
	both := func(answer doctor.Answer[string]) (ofPods, ofAll doctor.Answer[string]) { return answer, answer }
	if len(agents) == 0 {
		return both(doctor.UnknownAnswer[string]("no agent process is visible"))
	}
	if o.Simulated {
		return both(doctor.UnknownAnswer[string]("the host is simulated"))
	}
	p := agents[0]
	if dir := p.flags()["host-service-dir"]; dir != "" {
		ctx, cancel := context.WithTimeout(ctx, Patience)
		defer cancel()
		service, err := hostservice.NewClient(filepath.Join(p.dir, "root", dir), nil).DescribeService(ctx)
		switch {
		case errors.Is(err, fs.ErrPermission):
			return both(doctor.UnknownAnswer[string](err.Error())) // permission is missing to doctor, not to the agent
		case err != nil:
			return both(doctor.KnownAnswer(err.Error()))
		}
		return doctor.KnownAnswer(service.HiddenFromPods), doctor.KnownAnswer(service.HiddenFromAll)
	}
	if o.Self != o.Proc && filepath.Dir(p.dir) == filepath.Clean(o.Self) {
		return visibilityFrom(o.HostFS, inuse.CheckVisibility(o.HostFS))
	}
	may, err := p.hasCapability(unix.CAP_SYS_PTRACE)
	switch {
	case err != nil:
		return both(doctor.UnknownAnswer[string](err.Error()))
	case !may:
		return both(doctor.KnownAnswer("the agent's process lacks the capability CAP_SYS_PTRACE"))
	}
	host := os.DirFS(filepath.Join(p.dir, "root", p.flags()["host-root"]))
	err = inuse.VisibilityOf(host, filepath.Base(p.dir))
	if errors.Is(err, fs.ErrPermission) && os.Geteuid() != 0 {
		return both(doctor.UnknownAnswer[string](err.Error())) // permission is missing to doctor, not to the agent
	}
	return visibilityFrom(host, err)
}

// visibilityFrom returns why the open files of pods' processes and of all processes are not visible,
// given the result of the check for the pods' processes.
func visibilityFrom(host fs.FS, ofPods error) (pods, all doctor.Answer[string]) {
	answer := func(err error) doctor.Answer[string] {
		if err != nil {
			return doctor.KnownAnswer(err.Error())
		}
		return doctor.KnownAnswer("")
	}
	if ofPods != nil {
		return answer(ofPods), answer(ofPods)
	}
	return answer(nil), answer(inuse.VisibilityOfAll(host))
}

// hasCapability reports whether a process has a capability in its effective set
// (proc_pid_status(5)).
func (p process) hasCapability(capability int) (bool, error) {
	status, err := os.ReadFile(filepath.Join(p.dir, "status"))
	if err != nil {
		return false, err
	}
	for line := range strings.Lines(string(status)) {
		if set, found := strings.CutPrefix(line, "CapEff:"); found {
			bits, err := strconv.ParseUint(strings.TrimSpace(set), 16, 64)
			return bits>>capability&1 == 1, err
		}
	}
	return false, fmt.Errorf("%s/status: no CapEff", p.dir)
}
