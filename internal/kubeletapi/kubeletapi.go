// Package kubeletapi calls at sockets as the kubelet has and makes them, and asks
// it through its PodResources API (v1) which containers have what.
package kubeletapi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// maxAnswer is how long an answer may be, as the kubelet's own client has it
// (pkg/kubelet/apis/podresources/constants.go).
const maxAnswer = 16 << 20

// Listing is an answer of the kubelet.
type Listing struct {
	Pods []*podresourcesapi.PodResources

	// Whole says that the answer leaves out no pod with a container that runs.
	// The kubelet lists the pods that it knows (pkg/kubelet/apis/podresources/
	// server_v1.go, List): after its start none at first, then static ones, and
	// all others once the API server has named them. ListPods does not set it.
	Whole bool
}

// ErrAbsent is in an error that says that the kubelet has no PodResources API. To
// 1.27 it can be switched off (the feature gate KubeletPodResources).
var ErrAbsent = errors.New("the kubelet does not have it")

// Holding is what a container has of a resource by the kubelet's checkpoint.
type Holding struct {
	PodUID    string
	Container string
	Resource  string
	IDs       []string
	Nodes     []string // device nodes of the host that it was given with them
}

// ListPods asks the kubelet at a socket.
func ListPods(ctx context.Context, socket string) (*Listing, error) {
	if _, err := os.Lstat(socket); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("ask PodResources: %w: %w", ErrAbsent, err)
	}
	conn, err := Dial(socket)
	if err != nil {
		return nil, fmt.Errorf("ask PodResources: %w", err)
	}
	defer conn.Close()
	client := podresourcesapi.NewPodResourcesListerClient(conn)
	listed, err := client.List(ctx, &podresourcesapi.ListPodResourcesRequest{}, grpc.MaxCallRecvMsgSize(maxAnswer))
	if status.Code(err) == codes.Unimplemented {
		return nil, fmt.Errorf("ask PodResources at %s: %w: %w", socket, ErrAbsent, err)
	}
	if err != nil {
		return nil, fmt.Errorf("ask PodResources at %s: %w", socket, err)
	}
	return &Listing{Pods: listed.PodResources}, nil
}

// CDIDevices returns the names of the CDI devices that containers have by
// claims, as "vendor/class=name".
func (l *Listing) CDIDevices() (names []string) {
	for _, pod := range l.Pods {
		for _, container := range pod.Containers {
			for _, claim := range container.DynamicResources {
				names = append(names, cdiDevices(claim)...)
			}
		}
	}
	return names
}

func cdiDevices(claim *podresourcesapi.DynamicResource) (names []string) {
	for _, resource := range claim.ClaimResources {
		for _, device := range resource.CdiDevices {
			names = append(names, device.Name)
		}
	}
	return names
}

// PodName returns a pod's "namespace/name".
func PodName(pod *podresourcesapi.PodResources) string { return pod.Namespace + "/" + pod.Name }

// Dial prepares a connection to a socket. Each is for one call: one that is kept
// backs off for minutes while the other end is down.
func Dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", address)
		}),
	)
}
