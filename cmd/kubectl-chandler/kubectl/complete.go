package kubectl

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"chandler.dev/cmd/kubectl-chandler/kubectl/cluster"
)

// completeNodesAndPods completes the names of nodes, and of pods in the namespace. It leaves out
// names that the user may not list.
func (o *options) completeNodesAndPods(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	return o.complete(cmd, args, word, nodeNames, podNames)
}

// completePods completes the names of pods in the namespace.
func (o *options) completePods(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	return o.complete(cmd, args, word, podNames)
}

func (o *options) complete(cmd *cobra.Command, args []string, word string, names ...func(context.Context, kubernetes.Interface, string) []string) (out []string, _ cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	client, err := o.NewClient()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	namespace, err := o.ChosenNamespace()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	for _, list := range names {
		for _, name := range list(cmd.Context(), client, namespace) {
			if strings.HasPrefix(name, word) {
				out = append(out, name)
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

func nodeNames(ctx context.Context, client kubernetes.Interface, _ string) (out []string) {
	nodes, _ := cluster.ListObjects[corev1.Node](ctx, client.CoreV1().Nodes().List, metav1.ListOptions{})
	for i := range nodes {
		out = append(out, nodes[i].Name)
	}
	return out
}

func podNames(ctx context.Context, client kubernetes.Interface, namespace string) (out []string) {
	pods, _ := cluster.ListObjects[corev1.Pod](ctx, client.CoreV1().Pods(namespace).List, metav1.ListOptions{})
	for i := range pods {
		out = append(out, pods[i].Name)
	}
	return out
}
