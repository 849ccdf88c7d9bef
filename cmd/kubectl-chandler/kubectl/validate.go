package kubectl

import (
	"github.com/spf13/cobra"

	"chandler.dev/cmd/kubectl-chandler/validation"
)

func newValidate() *cobra.Command {
	return &cobra.Command{
		Use:   "validate FILE|DIRECTORY...",
		Short: "Check configurations, claims and device classes before they are used",
		Long: `Check what is written for Chandler, with the code that the agent checks it with.
Files are YAML or JSON, with any number of documents; - is standard input, and a
directory is all such files below it. It needs no cluster. It checks:

  DriverConfig, ProvisionConfig, ClaimParameters
      fields, values, that expressions compile, and that no entry has the expression
      of one before it (a warning)
  ConfigMap
      the configurations of Chandler that it holds
  ResourceClaim, ResourceClaimTemplate, DeviceClass
      fields, that selectors compile, and parameters for chandler.dev
  DeviceClass
      that no two of the files have one extendedResourceName (a warning)
  Pod, and whatever has a template for pods
      that the claims which containers name are claims of the pod

Other objects are named, and not checked. The exit code is 0 without errors;
warnings do not count.`,
		Example: `  kubectl chandler validate config.yaml
  kubectl chandler validate deployments my-classes.yaml
  kubectl get deviceclasses -o yaml | kubectl chandler validate -`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return validation.Files(cmd.InOrStdin(), cmd.OutOrStdout(), args)
		},
	}
}
