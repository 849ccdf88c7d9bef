// Package cluster connects to a cluster with the permissions of the user, reads the objects that concern
// devices, and reaches the agents' pods. It prints nothing.
package cluster

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"chandler.dev/internal/command"
)

// A Connection selects a cluster and connects to its API server.
type Connection struct {
	Version    string
	Kubeconfig clientcmd.ClientConfigLoadingRules
	Overrides  clientcmd.ConfigOverrides

	// Set by tests, which have no cluster.
	Client kubernetes.Interface
	Exec   func(ctx context.Context, pod *corev1.Pod, command []string) (stdout, stderr []byte, err error)
}

// NewConnection returns a connection to the cluster of the user's kubeconfig. version is the program's
// version.
func NewConnection(version string) Connection {
	return Connection{Version: version, Kubeconfig: *clientcmd.NewDefaultClientConfigLoadingRules()}
}

// AddClusterFlags adds the flags that select a cluster, with kubectl's names.
func (c *Connection) AddClusterFlags(flags *pflag.FlagSet) {
	flags.StringVar(&c.Kubeconfig.ExplicitPath, clientcmd.RecommendedConfigPathFlag, "", "kubeconfig `file`, by default $KUBECONFIG or ~/.kube/config")
	clientcmd.BindOverrideFlags(&c.Overrides, flags, clientcmd.RecommendedConfigOverrideFlags(""))
}

func (c *Connection) config() clientcmd.ClientConfig {
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(&c.Kubeconfig, &c.Overrides)
}

// ChosenNamespace returns the namespace of the command line or, without one, of the kubeconfig.
func (c *Connection) ChosenNamespace() (string, error) {
	if c.Client != nil {
		if ns := c.Overrides.Context.Namespace; ns != "" {
			return ns, nil
		}
		return "default", nil
	}
	namespace, _, err := c.config().Namespace()
	return namespace, err
}

// Rate limits for API requests. A report of many nodes needs many, and a user waits for it.
const (
	qps   = 50
	burst = 100
)

// RESTConfig returns the client configuration for the API server.
func (c *Connection) RESTConfig() (*rest.Config, error) {
	config, err := c.config().ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, errors.New("no cluster is configured: set KUBECONFIG or --kubeconfig")
	}
	if err != nil {
		return nil, command.KubeconfigError(err)
	}
	config = rest.AddUserAgent(config, "kubectl-chandler/"+c.Version)
	config.QPS, config.Burst = qps, burst
	return config, nil
}

// NewClient returns a client of the API server.
func (c *Connection) NewClient() (kubernetes.Interface, error) {
	if c.Client != nil {
		return c.Client, nil
	}
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = config.ContentType + ",application/json"
	return kubernetes.NewForConfig(config)
}

// ReadView reads the selected objects of the cluster.
func (c *Connection) ReadView(ctx context.Context, now time.Time, what Reading) (*View, error) {
	client, err := c.NewClient()
	if err != nil {
		return nil, err
	}
	namespace, err := c.ChosenNamespace()
	if err != nil {
		return nil, err
	}
	v := &View{Client: client, Namespace: namespace, Now: now}
	return v, v.read(ctx, what)
}
