// Package kubeletapi connects to sockets of the kubelet and of plugins, and queries the
// kubelet's PodResources API (v1) for the resources of containers.
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

// maxAnswer is the maximum size of a response, as in the kubelet's own client
// (pkg/kubelet/apis/podresources/constants.go).
const maxAnswer = 16 << 20

// Listing is a response of the kubelet.
type Listing struct {
	Pods []*podresourcesapi.PodResources

	// Whole means that the response omits no pod with a running container. The kubelet lists the
	// pods in its memory (pkg/kubelet/apis/podresources/server_v1.go, List): none right after its
	// start, then static pods, and all others once the API server has sent them. ListPods does not
	// set Whole.
	Whole bool
}

// ErrAbsent is wrapped by errors that mean that the kubelet has no PodResources API. Up to
// 1.27, the feature gate KubeletPodResources can disable the API.
var ErrAbsent = errors.New("the kubelet does not have it")

// Holding is a container's share of a resource according to the kubelet's checkpoint.
type Holding struct {
	PodUID    string
	Container string
	Resource  string
	IDs       []string
	Nodes     []string // the host's device nodes passed to the container with the IDs
}

// ListPods queries the kubelet at a socket.
func ListPods(ctx context.Context, socket string) (*Listing, error) {
	if _, err := os.Lstat(socket); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read PodResources: %w: %w", ErrAbsent, err)
	}
	conn, err := Dial(socket)
	if err != nil {
		return nil, fmt.Errorf("read PodResources: %w", err)
	}
	defer conn.Close()
	client := podresourcesapi.NewPodResourcesListerClient(conn)
	listed, err := client.List(ctx, &podresourcesapi.ListPodResourcesRequest{}, grpc.MaxCallRecvMsgSize(maxAnswer))
	if status.Code(err) == codes.Unimplemented {
		return nil, fmt.Errorf("read PodResources at %s: %w: %w", socket, ErrAbsent, err)
	}
	if err != nil {
		return nil, fmt.Errorf("read PodResources at %s: %w", socket, err)
	}
	return &Listing{Pods: listed.PodResources}, nil
}

// CDIDevices returns the names of the CDI devices of all claims, as "vendor/class=name".
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

// Dial prepares a connection to a socket. Use a connection for one call only: a long-lived
// connection backs off for minutes while the server is down.
func Dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", address)
		}),
	)
}
