{{/* Every map may be null or absent (values of an older chart), hence the parentheses. */}}

{{- define "specserve.fullname" -}}
{{- $name := .Values.nameOverride | default "specserve" -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- .Values.fullnameOverride | default $full | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{/* Immutable in a Deployment: the release alone, no version and no value. */}}
{{- define "specserve.selectorLabels" -}}
app.kubernetes.io/name: specserve
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "specserve.labels" -}}
{{- $own := dict "app.kubernetes.io/version" .Chart.AppVersion "app.kubernetes.io/managed-by" .Release.Service "app.kubernetes.io/part-of" "specserve" "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_") -}}
{{- $own = mergeOverwrite $own (include "specserve.selectorLabels" . | fromYaml) -}}
{{- toYaml (mergeOverwrite (dict) (.Values.commonLabels | default dict) $own) -}}
{{- end }}

{{- define "specserve.podLabels" -}}
{{- toYaml (mergeOverwrite (dict) (.Values.commonLabels | default dict) (.Values.podLabels | default dict) (include "specserve.selectorLabels" . | fromYaml)) -}}
{{- end }}

{{- define "specserve.serviceAccountName" -}}
{{- $create := include "specserve.on" (list .Values.serviceAccount "create") -}}
{{- (.Values.serviceAccount).name | default (ternary (include "specserve.fullname" .) "default" (eq $create "true")) -}}
{{- end }}

{{/* Is a switch that is on by default on: "true" or nothing. */}}
{{- define "specserve.on" -}}
{{- $map := index . 0 | default dict -}}
{{- $value := get $map (index . 1) -}}
{{- if or (kindIs "invalid" $value) (not (hasKey $map (index . 1))) -}}true{{- else if $value -}}true{{- end -}}
{{- end }}

{{- define "specserve.image" -}}
{{- $image := .Values.image | default dict -}}
{{- $registry := $image.registry | default (.Values.global).imageRegistry -}}
{{- $name := $image.repository | default "specserve/specserve-operator" -}}
{{- with $registry }}{{ $name = printf "%s/%s" (trimSuffix "/" .) $name }}{{ end -}}
{{- if $image.digest }}{{ $name }}@{{ $image.digest }}{{ else }}{{ $name }}:{{ $image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end }}

{{/* The served namespaces as a JSON list; an empty list is all of them. */}}
{{- define "specserve.namespaces" -}}
{{- $list := .Values.watchNamespaces | default list -}}
{{- if has "*" $list }}{{ $list = list }}{{ end -}}
{{- toJson ($list | uniq) -}}
{{- end }}

{{- define "specserve.leaseName" -}}
{{- (.Values.leaderElection).leaseName | default (include "specserve.fullname" .) -}}
{{- end }}

{{/* Rights on what the operator serves and makes, in one namespace or in all. */}}
{{- define "specserve.rules" -}}
# What the operator serves.
- apiGroups: [specserve.dev]
  resources: [specserves]
  verbs: [get, list, watch]
- apiGroups: [specserve.dev]
  resources: [specserves/status]
  verbs: [patch]
# Clusters that enforce it ask for this right of who makes owner references that block deletion.
- apiGroups: [specserve.dev]
  resources: [specserves/finalizers]
  verbs: [update]
# What it makes. Server-side apply creates by PATCH, which takes both verbs.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Engine credentials, and the keys that a SpecServe names.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, list, watch, create, patch]
# Engine pods are read, never written.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}
