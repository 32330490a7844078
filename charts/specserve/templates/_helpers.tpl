{{/* Every map may be null or absent (values of an older chart), hence the parentheses. */}}

{{- define "specserve.fullname" -}}
{{- $name := .Values.nameOverride | default "specserve" -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- /* Names of releases may, names of Services may not begin with a digit or have dots. */ -}}
{{- if regexMatch "^[0-9]" $full }}{{ $full = printf "%s-%s" $name .Release.Name }}{{ end -}}
{{- regexReplaceAll "-+$" (.Values.fullnameOverride | default ($full | replace "." "-") | trunc 52) "" -}}
{{- end }}

{{/* Immutable in a Deployment: the release alone, no version and no value. */}}
{{- define "specserve.selectorLabels" -}}
app.kubernetes.io/name: specserve
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "specserve.labels" -}}
{{- $own := dict "app.kubernetes.io/version" .Chart.AppVersion "app.kubernetes.io/managed-by" .Release.Service "app.kubernetes.io/part-of" "specserve" "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_") -}}
{{- $own = mergeOverwrite $own (include "specserve.selectorLabels" . | fromYaml) -}}
{{- toYaml (mergeOverwrite (include "specserve.yaml" .Values.commonLabels | fromYaml) $own) -}}
{{- end }}

{{- define "specserve.podLabels" -}}
{{- toYaml (mergeOverwrite (include "specserve.yaml" .Values.commonLabels | fromYaml) (include "specserve.yaml" .Values.podLabels | fromYaml) (include "specserve.selectorLabels" . | fromYaml)) -}}
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

{{/* A number that may be 0, of a map, under a key, and what it is by default, as JSON. */}}
{{- define "specserve.number" -}}
{{- $map := index . 0 | default dict -}}
{{- $value := index . 2 -}}
{{- if hasKey $map (index . 1) }}{{ $value = ternary $value (get $map (index . 1)) (kindIs "invalid" (get $map (index . 1))) }}{{ end -}}
{{- toJson $value -}}
{{- end }}

{{/* What is handed on to Kubernetes, as YAML: without nulls at any depth, nothing if it is empty. */}}
{{- define "specserve.yaml" -}}
{{- with get (include "specserve.compact" . | fromJson) "value" }}{{ toYaml . }}{{ end -}}
{{- end }}

{{- define "specserve.compact" -}}
{{- $out := . -}}
{{- if kindIs "map" . -}}
{{- $out = dict -}}
{{- range $key, $value := . }}{{ if not (kindIs "invalid" $value) }}{{ $_ := set $out $key (get (include "specserve.compact" $value | fromJson) "value") }}{{ end }}{{ end -}}
{{- else if kindIs "slice" . -}}
{{- $out = list -}}
{{- range . }}{{ if not (kindIs "invalid" .) }}{{ $out = append $out (get (include "specserve.compact" . | fromJson) "value") }}{{ end }}{{ end -}}
{{- end -}}
{{- toJson (dict "value" $out) -}}
{{- end }}

{{/* Timing of the leader election, as a JSON object, in the only order in which no two can lead. */}}
{{- define "specserve.lease" -}}
{{- $given := .Values.leaderElection | default dict -}}
{{- $lease := $given.leaseSeconds | default 12 | float64 -}}
{{- $renew := $given.renewSeconds | default 8 | float64 -}}
{{- $retry := $given.retrySeconds | default 2 | float64 -}}
{{- if not (and (gt $lease $renew) (gt $renew $retry)) -}}
{{- fail (printf "leaderElection: leaseSeconds (%v) must be above renewSeconds (%v), and that above retrySeconds (%v)" $lease $renew $retry) -}}
{{- end -}}
{{- toJson (dict "lease" $lease "renew" $renew "retry" $retry) -}}
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
# The break-even curves that a SpecServe names, and the one that is measured of it.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, patch]
# Engine pods are read; the label that keeps one in its Service is written.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
# What measures a pod that was taken out of its Service.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, create, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}
