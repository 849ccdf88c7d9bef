package kubectl

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
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
	if nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{}); err == nil {
		for i := range nodes.Items {
			out = append(out, nodes.Items[i].Name)
		}
	}
	return out
}

func podNames(ctx context.Context, client kubernetes.Interface, namespace string) (out []string) {
	if pods, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{}); err == nil {
		for i := range pods.Items {
			out = append(out, pods.Items[i].Name)
		}
	}
	return out
}
