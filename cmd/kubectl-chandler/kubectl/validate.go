package kubectl

import (
	"github.com/spf13/cobra"

	"chandler.dev/cmd/kubectl-chandler/validation"
)

func newValidate() *cobra.Command {
	return &cobra.Command{
		Use:   "validate FILE|DIRECTORY...",
		Short: "Check configurations, claims and device classes before they are used",
		Long: `Check configurations, claims and classes with the same code as the agent. Files are
YAML or JSON with any number of documents; - is standard input, and a directory stands
for all such files below it. The command needs no cluster. It checks:

  DriverConfig, ProvisionConfig, ClaimParameters
      fields, values, that expressions compile, and that no entry repeats the
      expression of a previous one (a warning)
  ConfigMap
      the configurations of Chandler in it
  ResourceClaim, ResourceClaimTemplate, DeviceClass
      fields, that selectors compile, and parameters for chandler.dev
  DeviceClass
      that no two files have the same extendedResourceName (a warning)
  Pod, and objects with a pod template
      that containers refer to claims of the pod

Other objects are listed, and not checked. The exit code is 0 without errors;
warnings do not change it.`,
		Example: `  kubectl chandler validate config.yaml
  kubectl chandler validate deployments my-classes.yaml
  kubectl get deviceclasses -o yaml | kubectl chandler validate -`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return validation.Files(cmd.InOrStdin(), cmd.OutOrStdout(), args)
		},
	}
}
