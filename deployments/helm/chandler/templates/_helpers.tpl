{{/*
Names are fixed: a node has one agent, since the driver's name and its sockets are there once. So a cluster has one
release, whatever its name.
*/}}

{{- define "chandler.image" -}}
{{- $nvml := ternary "nvml" (printf "%s-nvml" .Chart.AppVersion) (eq .Chart.AppVersion "latest") -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default (ternary $nvml $.Chart.AppVersion (or $.Values.nvml.enabled $.Values.sharingDaemons.enabled (not (empty $.Values.nvidiaDriver.root)))) }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
The API version of DeviceClasses: the newest version of resource.k8s.io that the API server serves, or empty. The version of
Kubernetes matters too, because "helm template" assumes that all API versions are served.
*/}}
{{- define "chandler.dra" -}}
{{- $kube := .Capabilities.KubeVersion.Version -}}
{{- $apis := .Capabilities.APIVersions -}}
{{- if and (semverCompare ">=1.34-0" $kube) ($apis.Has "resource.k8s.io/v1") -}}resource.k8s.io/v1
{{- else if and (semverCompare ">=1.33-0" $kube) ($apis.Has "resource.k8s.io/v1beta2") -}}resource.k8s.io/v1beta2
{{- else if and (semverCompare ">=1.32-0" $kube) ($apis.Has "resource.k8s.io/v1beta1") -}}resource.k8s.io/v1beta1
{{- end -}}
{{- end -}}

{{/* Whether the API server has policies, which it has in v1 since 1.30. */}}
{{- define "chandler.admission" -}}
{{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version -}}true{{- end -}}
{{- end -}}

{{/* Whether policies about resource.k8s.io are of use, in any version. */}}
{{- define "chandler.policies" -}}
{{- $apis := .Capabilities.APIVersions -}}
{{- $dra := or (include "chandler.dra" .) ($apis.Has "resource.k8s.io/v1beta2") ($apis.Has "resource.k8s.io/v1beta1") -}}
{{- if and $dra (include "chandler.admission" .) -}}true{{- end -}}
{{- end -}}

{{/* The agents' configuration: that of the values, with the roots that other values stand for. */}}
{{- define "chandler.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $roots := dict -}}
{{- if and .Values.nvml.enabled (ne .Values.nvml.root "/usr") }}{{ $_ := set $roots "nvidia" .Values.nvml.root }}{{ end -}}
{{- with .Values.nvidiaDriver.root }}{{ $_ := set $roots "nvidia" . }}{{ end -}}
{{- if .Values.mps.enabled }}{{ $_ := set $roots "nvidia-mps" .Values.mps.directory }}{{ end -}}
{{- if .Values.fpgaProgramming.enabled }}{{ $_ := set $roots "fpga-intel" .Values.fpgaProgramming.bitstreams }}{{ end -}}
{{- with merge (default dict $config.driverRoots) $roots }}{{ $_ := set $config "driverRoots" . }}{{ end -}}
apiVersion: chandler.dev/v1alpha1
kind: DriverConfig
{{- with $config }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The directories of the host with NVIDIA's driver and its library NVML, as JSON. */}}
{{- define "chandler.driverDirectories" -}}
{{- $root := .Values.nvidiaDriver.root -}}
{{- if eq $root "/" -}}{{ concat (list "/usr" "/lib/firmware") (.Values.nvidiaDriver.directories | default list) | toJson }}
{{- else if $root -}}{{ list $root | toJson }}
{{- else if .Values.nvml.enabled -}}{{ list .Values.nvml.root | toJson }}
{{- else -}}[]{{- end -}}
{{- end -}}

{{/* Whether the agent must be privileged: a container that was given no device can open none otherwise. */}}
{{- define "chandler.privileged" -}}
{{- if or .Values.nvml.enabled .Values.fpgaProgramming.enabled .Values.passthrough.enabled .Values.reclaim.enabled .Values.onDemand.enabled -}}true{{- end -}}
{{- end -}}

{{/* The port of the web UI, if it does not listen on localhost only. */}}
{{- define "chandler.webUIPort" -}}
{{- with .Values.webUI.bindAddress -}}
{{- if not (regexMatch "^(127\\.[0-9.]+|localhost|\\[::1\\]):" .) -}}{{ regexFind "[0-9]+$" . }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* The port of the collector of traces. Without one in the URL it is that of OTLP over gRPC. */}}
{{- define "chandler.tracesPort" -}}
{{- with (urlParse .Values.traces.endpoint).host -}}
{{- regexFind "[0-9]+$" (regexFind ":[0-9]+$" .) | default "4317" -}}
{{- end -}}
{{- end -}}
