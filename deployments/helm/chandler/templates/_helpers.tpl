{{/*
Names are fixed: a node has one agent, because it has the driver's name and its sockets once. Therefore, a cluster has one release
only. Its groups of nodes can have different settings.
*/}}

{{/* The image of the agent. */}}
{{- define "chandler.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ with .digest }}@{{ . }}{{ else }}:{{ include "chandler.tag" $ }}{{ end }}
{{- end -}}
{{- end -}}

{{/* The image with chandler-host. */}}
{{- define "chandler.hostImage" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .hostDigest }}@{{ .hostDigest }}{{ else }}:{{ include "chandler.tag" $ }}-host{{ end }}
{{- end -}}
{{- end -}}

{{/* The tag of the agent's image. */}}
{{- define "chandler.tag" -}}
{{ .Values.image.tag | default .Chart.AppVersion | default "" | trimSuffix "-host" }}
{{- end -}}

{{/* Whether a pod has the image with chandler-host. */}}
{{- define "chandler.usesHostImage" -}}
{{- if or .Values.sharingDaemons.enabled (include "chandler.hostService" .) -}}true{{- end -}}
{{- end -}}

{{- define "chandler.labels" -}}
app.kubernetes.io/name: chandler
{{ include "chandler.releaseLabels" . }}
{{- end -}}

{{/* The standard labels besides the name. */}}
{{- define "chandler.releaseLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- with .Chart.AppVersion | default .Values.image.tag }}
app.kubernetes.io/version: {{ . | trunc 63 | trimAll "-_." | quote }}
{{- end }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimAll "-_." }}
{{- end -}}

{{/*
Includes a template for the nodes of no group, and then for each group of nodes. The argument is a list of the chart's
context and the template's name. The template gets the values of its group, and the selectors of the nodes that it must
leave to others: a node that several groups select belongs to the first.
*/}}
{{- define "chandler.eachGroup" -}}
{{- $top := index . 0 -}}
{{- $template := index . 1 -}}
{{- $context := pick $top "Release" "Chart" "Capabilities" "Template" "Files" -}}
{{- $selectors := list -}}
{{- $out := list -}}
{{- range $group := $top.Values.nodeGroups | default list -}}
{{- $values := mergeOverwrite (deepCopy $top.Values) (deepCopy $group) -}}
{{- $_ := set $values "nodeSelector" $group.nodeSelector -}}
{{- $out = append $out (include $template (merge (dict "Values" $values "group" $group.name "excluded" $selectors) $context) | trim) -}}
{{- $selectors = append $selectors $group.nodeSelector -}}
{{- end -}}
{{- $first := include $template (merge (dict "Values" $top.Values "group" "" "excluded" $selectors) $context) | trim -}}
{{- prepend $out $first | compact | join "\n---\n" -}}
{{- end -}}

{{/* The name of the DaemonSet and the ConfigMap of a group of nodes. */}}
{{- define "chandler.groupName" -}}
chandler{{ with .group }}-{{ . }}{{ end }}
{{- end -}}

{{/* The labels by which a DaemonSet finds its pods, besides the name. */}}
{{- define "chandler.groupLabel" -}}
chandler.dev/node-group: {{ .group | default "default" }}
{{- end -}}

{{/*
The affinity of the values, limited to nodes without the label chandler.dev/agent=off that no other group has. The terms of a
node selector are alternatives. Thus each label of another group's selector leads to further terms.
*/}}
{{- define "chandler.affinity" -}}
{{- $affinity := deepCopy (.Values.affinity | default dict) -}}
{{- $node := $affinity.nodeAffinity | default dict -}}
{{- $required := $node.requiredDuringSchedulingIgnoredDuringExecution | default dict -}}
{{- $terms := $required.nodeSelectorTerms | default (list (dict)) -}}
{{- range $selector := .excluded -}}
{{- $more := list -}}
{{- range $term := $terms -}}
{{- range $key, $value := $selector -}}
{{- $expressions := append ($term.matchExpressions | default list) (dict "key" $key "operator" "NotIn" "values" (list $value)) -}}
{{- $more = append $more (merge (dict "matchExpressions" $expressions) $term) -}}
{{- end -}}
{{- end -}}
{{- $terms = $more -}}
{{- end -}}
{{- $out := list -}}
{{- range $term := $terms -}}
{{- $expressions := append ($term.matchExpressions | default list) (dict "key" "chandler.dev/agent" "operator" "NotIn" "values" (list "off")) -}}
{{- $out = append $out (merge (dict "matchExpressions" $expressions) $term) -}}
{{- end -}}
{{- $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $out) -}}
{{- $_ := set $affinity "nodeAffinity" $node -}}
{{ toYaml $affinity }}
{{- end -}}

{{/*
A checksum of the fields of the configuration that need a restart of the agent, or "" if none of them is set. As an annotation of
the pods, it makes an upgrade restart the agents if such a field has changed.
*/}}
{{- define "chandler.restartChecksum" -}}
{{- $config := (include "chandler.config" . | fromYaml) -}}
{{- $fields := pick $config "driverRoots" "paths" "hooks" "passthrough" -}}
{{- with omit ($config.onDemand | default dict) "keepSeconds" }}{{ $_ := set $fields "onDemand" . }}{{ end -}}
{{- range $config.resources }}{{ if hasKey . "sriov" }}{{ $_ := set $fields "sriov" true }}{{ end }}{{ end -}}
{{- with $fields }}{{ toJson . | sha256sum }}{{ end -}}
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

{{/* The root of NVIDIA's driver, "/" for the host's own. The agent's configuration can name a directory below nvidiaDriver.root. */}}
{{- define "chandler.nvmlRoot" -}}
{{- if .Values.nvidiaDriver.root }}{{ get (include "chandler.config" . | fromYaml).driverRoots "nvidia" }}
{{- else }}{{ ternary "/" .Values.nvml.root (eq .Values.nvml.root "/usr") }}{{ end -}}
{{- end -}}

{{/* The directories of the host with NVIDIA's driver and its library NVML, as JSON. */}}
{{- define "chandler.driverDirectories" -}}
{{- $root := .Values.nvidiaDriver.root -}}
{{- if eq $root "/" -}}{{ concat (list "/usr" "/lib/firmware") (.Values.nvidiaDriver.directories | default list) | toJson }}
{{- else if $root -}}{{ list $root | toJson }}
{{- else if .Values.nvml.enabled -}}{{ list .Values.nvml.root | toJson }}
{{- else -}}[]{{- end -}}
{{- end -}}

{{/* The directories of these that the agent reads. The host service alone reads those of NVML. */}}
{{- define "chandler.agentDriverDirectories" -}}
{{- if and (not .Values.nvidiaDriver.root) (eq .Values.nvml.root "/usr") -}}[]
{{- else -}}{{ include "chandler.driverDirectories" . }}{{- end -}}
{{- end -}}

{{/* Mounts of the directories of a JSON list. */}}
{{- define "chandler.driverMounts" -}}
{{- range $i, $directory := .directories | fromJsonArray }}
- {name: {{ ternary "nvml" (printf "nvml-%d" $i) (eq $i 0) }}, mountPath: {{ printf "/host%s" $directory }}, readOnly: true{{ if $.root }}, mountPropagation: HostToContainer{{ end }}}
{{- end }}
{{- end -}}

{{/* Their volumes. */}}
{{- define "chandler.driverVolumes" -}}
{{- range $i, $directory := .directories | fromJsonArray }}
- name: {{ ternary "nvml" (printf "nvml-%d" $i) (eq $i 0) }}
  hostPath: {path: {{ $directory }}, type: {{ ternary "DirectoryOrCreate" "Directory" (and (not (empty $.root)) (not (has $directory (list "/usr" "/lib/firmware")))) }}}
{{- end }}
{{- end -}}

{{/* Whether a feature changes and examines the host. */}}
{{- define "chandler.changesHost" -}}
{{- if or .Values.passthrough.enabled .Values.reclaim.enabled .Values.onDemand.enabled -}}true{{- end -}}
{{- end -}}

{{/* Whether a feature needs the host service with privilege: it also reads NVML and programs FPGAs. */}}
{{- define "chandler.privilegedHostService" -}}
{{- if or .Values.nvml.enabled .Values.fpgaProgramming.enabled (include "chandler.changesHost" .) -}}true{{- end -}}
{{- end -}}

{{/* Whether a feature needs the host service: it also finds the files of NVIDIA's driver. */}}
{{- define "chandler.hostService" -}}
{{- if or .Values.nvidiaDriver.root (include "chandler.privilegedHostService" .) -}}true{{- end -}}
{{- end -}}

{{/* The attributes of PCI functions that the enabled features write. */}}
{{- define "chandler.hostAttributes" -}}
{{- $attributes := list -}}
{{- if or .Values.passthrough.enabled .Values.onDemand.enabled }}{{ $attributes = list "bind" "driver_override" "drivers_probe" "unbind" }}{{ end -}}
{{- if .Values.onDemand.enabled }}{{ $attributes = concat $attributes (list "current_compute_partition" "sriov_numvfs") }}{{ end -}}
{{- if .Values.reclaim.enabled }}{{ $attributes = concat $attributes (list "reset" "reset_method") }}{{ end -}}
{{ join "," $attributes }}
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
