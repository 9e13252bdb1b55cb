{{/* Names and labels. */}}

{{- define "opticnerve.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "opticnerve.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "opticnerve.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "opticnerve.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "opticnerve.image" -}}
{{- $repository := required "image.repository is not set: name the image that you built and pushed (see Dockerfile)" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "opticnerve.hubRepository" -}}
{{- required "model.hub.repository is not set: name the repository to download from, such as org/model" .Values.model.hub.repository -}}
{{- end -}}

{{/* What the server is told by flags; everything else is in its configuration file. */}}

{{- define "opticnerve.modelPath" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "hub" -}}
/models/{{ include "opticnerve.hubRepository" . | base }}
{{- else if eq $model.source "demo" -}}
/models/demo
{{- else if eq $model.source "image" -}}
{{ required "model.path is not set: name the checkpoint's directory in the image" $model.path }}
{{- else -}}
{{ list "/models" $model.path | join "/" | clean }}
{{- end -}}
{{- end -}}

{{/* Keys as the server's file has them. JSON strings, numbers and booleans are TOML's; toJson writes 4Gi as digits, not as 4.29e+09. */}}
{{- define "opticnerve.config" -}}
{{- range $key, $value := .Values.server }}
{{- if not (kindIs "invalid" $value) }}
{{- $key }} = {{ toJson $value }}
{{ end }}
{{- end }}
{{- end -}}

{{/* Durations, in whole seconds. All follow from the server's own settings. */}}

{{- define "opticnerve.startupSeconds" -}}
{{- .Values.server.startup_timeout | ceil | int64 -}}
{{- end -}}

{{/* The server needs drain_delay + grace, then up to 10 s to end its processes; a preStop sleep comes out of the same time. */}}
{{- define "opticnerve.terminationSeconds" -}}
{{- $sleep := dig "preStop" "sleep" "seconds" 0 .Values.lifecycle -}}
{{- addf .Values.server.drain_delay .Values.server.grace $sleep 10 | ceil | int64 -}}
{{- end -}}

{{/* Who scales: "" for nobody but the operator. */}}
{{- define "opticnerve.autoscaled" -}}
{{- if or .Values.autoscaling.keda.enabled .Values.autoscaling.hpa.enabled }}yes{{ end -}}
{{- end -}}
