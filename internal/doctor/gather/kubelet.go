package gather

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"sigs.k8s.io/yaml"

	"chandler.dev/discovery"
	"chandler.dev/internal/doctor"
	"chandler.dev/internal/kubeletapi"
)

// maxAnswer is the largest accepted PodResources response, as in package kubeletapi.
const maxAnswer = 16 << 20

func gatherKubelet(ctx context.Context, o Options, processes []process, f *doctor.Facts) {
	k := &f.Kubelet
	k.Dir = withPatience(ctx, "the device-plugins directory", func() (string, error) { return unwritableReason(o.PluginDir), nil })
	k.Answers = withPatience(ctx, "the kubelet's registration socket", func() (string, error) { return connectError(ctx, filepath.Join(o.PluginDir, "kubelet.sock")), nil })
	socket := filepath.Join(o.KubeletRoot, "pod-resources/kubelet.sock")
	ask, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	listing, err := kubeletapi.ListPods(ask, socket)
	if err == nil {
		k.Pods = doctor.KnownAnswer(listing.Pods)
	} else {
		k.Pods = doctor.UnknownAnswer[[]*podresourcesapi.PodResources](err.Error())
	}
	k.Allocatable = doctor.AnswerOf(allocatableDevices(ask, socket))
	entries, err := os.ReadDir(filepath.Join(o.KubeletRoot, "plugins_registry"))
	there := false
	for _, entry := range entries {
		there = there || strings.HasPrefix(entry.Name(), discovery.Domain) && entry.Type()&fs.ModeSocket != 0
	}
	k.Registration = doctor.AnswerOf(there, err)

	flags, config := flagsOf(o, processes)
	k.Flags, k.Config = flags, config
}

// connectError returns the error of connecting to a socket, or "" if a process listens there.
func connectError(ctx context.Context, socket string) string {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return err.Error()
	}
	conn.Close()
	return ""
}

// allocatableDevices returns the devices that device plugins have listed as healthy, according to
// the kubelet (pkg/kubelet/cm/devicemanager/manager.go, GetAllocatableDevices, read in 1.28 to
// 1.37).
func allocatableDevices(ctx context.Context, socket string) ([]*podresourcesapi.ContainerDevices, error) {
	conn, err := kubeletapi.Dial(socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	answer, err := podresourcesapi.NewPodResourcesListerClient(conn).GetAllocatableResources(ctx, &podresourcesapi.AllocatableResourcesRequest{}, grpc.MaxCallRecvMsgSize(maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("get allocatable devices from PodResources: %w", err)
	}
	return answer.Devices, nil
}

// flagsOf returns the flags of the node's kubelet and the contents of its configuration file.
func flagsOf(o Options, processes []process) (doctor.Answer[map[string]string], doctor.Answer[doctor.KubeletConfig]) {
	flags, err := kubeletFlags(o, named(processes, "kubelet"))
	if err != nil {
		return doctor.UnknownAnswer[map[string]string](err.Error()), doctor.UnknownAnswer[doctor.KubeletConfig](err.Error())
	}
	return doctor.KnownAnswer(flags), doctor.AnswerOf(kubeletConfig(o, flags))
}

// kubeletFlags returns the flags of the kubelet. If several kubelets run on the machine, as
// with nodes that are containers, the kubelet with this node's directory or name is used.
func kubeletFlags(o Options, kubelets []process) (map[string]string, error) {
	switch len(kubelets) {
	case 0:
		return nil, fmt.Errorf("no kubelet process is visible in %s", o.Proc)
	case 1:
		return kubelets[0].flags(), nil
	}
	for _, p := range kubelets {
		if flags := p.flags(); flags["root-dir"] == o.KubeletRoot || flags["hostname-override"] == o.Node {
			return flags, nil
		}
	}
	return nil, fmt.Errorf("%d kubelets run on this machine, and it cannot be told which is this node's", len(kubelets))
}

func kubeletConfig(o Options, flags map[string]string) (c doctor.KubeletConfig, err error) {
	c.FeatureGates = make(map[string]bool)
	if name := flags["config"]; name != "" {
		if o.Root == "" {
			return c, fmt.Errorf("%s cannot be read from here", name)
		}
		data, err := os.ReadFile(filepath.Join(o.Root, name))
		if err != nil {
			return c, err
		}
		var file struct {
			FeatureGates          map[string]bool `json:"featureGates"`
			TopologyManagerPolicy string          `json:"topologyManagerPolicy"`
		}
		if err := yaml.Unmarshal(data, &file); err != nil {
			return c, fmt.Errorf("%s: %w", name, err)
		}
		maps.Copy(c.FeatureGates, file.FeatureGates)
		c.TopologyPolicy = file.TopologyManagerPolicy
	}
	// The command line overrides the file (cmd/kubelet/app/server.go).
	if policy := flags["topology-manager-policy"]; policy != "" {
		c.TopologyPolicy = policy
	}
	var errs []error
	for setting := range strings.SplitSeq(flags["feature-gates"], ",") {
		name, value, found := strings.Cut(setting, "=")
		if !found {
			continue
		}
		on, err := strconv.ParseBool(value)
		errs = append(errs, err)
		c.FeatureGates[name] = on
	}
	return c, errors.Join(errs...)
}
