{{/* The server's container. */}}

{{- define "opticnerve.serverContainer" -}}
name: opticnerve
image: {{ include "opticnerve.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - serve
  - --config=/etc/opticnerve/config.toml
  - --model={{ include "opticnerve.modelPath" . }}
  - --listen=0.0.0.0:{{ .Values.ports.grpc }}
  - --health-listen=0.0.0.0:{{ .Values.ports.health }}
  - --metrics-listen=0.0.0.0:{{ .Values.ports.metrics }}
  - --advertise=$(POD_IP):{{ .Values.ports.grpc }}
  {{- if .Values.tls.secretName }}
  - --tls-cert=/etc/opticnerve/tls/tls.crt
  - --tls-key=/etc/opticnerve/tls/tls.key
  {{- if .Values.tls.clientCertificates }}
  - --tls-client-ca=/etc/opticnerve/tls/ca.crt
  {{- end }}
  {{- end }}
  {{- if .Values.auth.secretName }}
  - --auth-token-file=/etc/opticnerve/auth/{{ .Values.auth.key }}
  {{- end }}
env:
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- with .Values.env }}{{ toYaml . | nindent 2 }}{{ end }}
ports:
  - {name: grpc, containerPort: {{ .Values.ports.grpc }}}
  - {name: health, containerPort: {{ .Values.ports.health }}}
  - {name: metrics, containerPort: {{ .Values.ports.metrics }}}
{{- with .Values.probes }}
{{- /* A server that cannot start says why, and ends, before the kubelet gives up on it. */}}
startupProbe:
  grpc: {port: {{ $.Values.ports.health }}, service: startup}
  periodSeconds: {{ .startup.periodSeconds }}
  timeoutSeconds: {{ .startup.timeoutSeconds }}
  failureThreshold: {{ add 2 (divf $.Values.server.startup_timeout .startup.periodSeconds | ceil | int64) }}
readinessProbe:
  grpc: {port: {{ $.Values.ports.health }}, service: readiness}
  {{- toYaml .readiness | nindent 2 }}
livenessProbe:
  grpc: {port: {{ $.Values.ports.health }}, service: liveness}
  {{- toYaml .liveness | nindent 2 }}
{{- end }}
{{- with .Values.lifecycle }}
lifecycle: {{- toYaml . | nindent 2 }}
{{- end }}
resources: {{- include "opticnerve.resources" . | nindent 2 }}
securityContext: {{- toYaml .Values.securityContext | nindent 2 }}
volumeMounts:
  - {name: config, mountPath: /etc/opticnerve/config.toml, subPath: config.toml, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  - {name: cache, mountPath: /cache}
  {{- if ne .Values.model.source "image" }}
  - {name: models, mountPath: /models, readOnly: true}
  {{- end }}
  {{- /* Whole directories: what is mounted by subPath never changes, and these are read again when they do. */}}
  {{- if .Values.tls.secretName }}
  - {name: tls, mountPath: /etc/opticnerve/tls, readOnly: true}
  {{- end }}
  {{- if .Values.auth.secretName }}
  - {name: auth, mountPath: /etc/opticnerve/auth, readOnly: true}
  {{- end }}
{{- end -}}

{{/* One GPU a replica: what a server uses. */}}
{{- define "opticnerve.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- with .Values.gpu.resource -}}
{{- $_ := set $resources "limits" (merge (dict . 1) ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "opticnerve.volumes" -}}
- name: config
  configMap: {name: {{ include "opticnerve.fullname" . }}}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 256Mi}
- name: cache
  emptyDir: {sizeLimit: 2Gi}
{{- if eq .Values.model.source "claim" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ required "model.claim is not set: name the PersistentVolumeClaim with the checkpoint, or choose another model.source" .Values.model.claim }}
    readOnly: true
{{- else if ne .Values.model.source "image" }}
- name: models
  emptyDir: {sizeLimit: {{ .Values.model.hub.size }}}
{{- end }}
{{- with .Values.tls.secretName }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.auth.secretName }}
- name: auth
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* What brings the weights, where they are neither in a claim nor in the image. */}}
{{- define "opticnerve.weightsContainer" -}}
{{- $model := .Values.model -}}
{{- if or (eq $model.source "hub") (eq $model.source "demo") -}}
name: weights
image: {{ include "opticnerve.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  {{- if eq $model.source "demo" }}
  - make-checkpoint
  - --arch=qwen3_vl
  {{- else }}
  - download
  - --repository={{ include "opticnerve.hubRepository" . }}
  - --revision={{ required "model.hub.revision is not set: name the commit to download, 40 hexadecimal digits" $model.hub.revision }}
  {{- end }}
  - --out={{ include "opticnerve.modelPath" . }}
{{- $token := and (eq $model.source "hub") $model.hub.tokenSecret }}
{{- if or $token .Values.env }}
env:
  {{- with $token }}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
  {{- end }}
  {{- with .Values.env }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
resources: {{- toYaml .Values.weightsResources | nindent 2 }}
securityContext: {{- toYaml .Values.securityContext | nindent 2 }}
volumeMounts:
  - {name: models, mountPath: /models}
  - {name: tmp, mountPath: /tmp}
  - {name: cache, mountPath: /cache}
{{- end -}}
{{- end -}}
