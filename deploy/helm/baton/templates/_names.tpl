{{/* Names, labels, images and the ports that the chart fixes. */}}

{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.cluster" -}}
{{- default (include "baton.fullname" .) .Values.cluster -}}
{{- end -}}

{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The ports: http, control, events, metrics, store. */}}
{{- define "baton.port" -}}
{{- get (dict "http" 8000 "control" 7400 "events" 7401 "metrics" 9400 "store" 6379) . -}}
{{- end -}}

{{/* The image of a device: dict "root" $ "device" "cuda" "image" overrides. */}}
{{- define "baton.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (default dict .image) -}}
{{- $name := default "baton" $image.repository -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest | quote -}}
{{- else -}}
{{- printf "%s:%s" $name (default (printf "%s-%s" .root.Chart.AppVersion .device) $image.tag) | quote -}}
{{- end -}}
{{- end -}}

{{- define "baton.pullPolicy" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (default dict .image) -}}
{{- default (ternary "IfNotPresent" "Never" (not (empty $image.repository))) $image.pullPolicy -}}
{{- end -}}

{{/* The device whose image routers and jobs run: cuda if every pool does. */}}
{{- define "baton.commonDevice" -}}
{{- $device := "cuda" -}}
{{- range $pool := include "baton.pools" . | fromYaml -}}
{{- if ne $pool.device "cuda" -}}{{- $device = "cpu" -}}{{- end -}}
{{- end -}}
{{- $device -}}
{{- end -}}

{{- define "baton.secretName" -}}
{{- default (printf "%s-secrets" (include "baton.fullname" .)) .Values.secrets.existingSecret -}}
{{- end -}}

{{- define "baton.routerUrl" -}}
{{- $scheme := ternary "https" "http" (not (empty .Values.router.tls.secretName)) -}}
{{- printf "%s://%s:%s" $scheme (include "baton.fullname" .) (include "baton.servicePort" .) -}}
{{- end -}}

{{- define "baton.servicePort" -}}
{{- if .Values.router.service.port -}}
{{- .Values.router.service.port | int -}}
{{- else -}}
{{- ternary 443 80 (not (empty .Values.router.tls.secretName)) -}}
{{- end -}}
{{- end -}}

{{/* A value as the text of a flag: whole numbers without exponent, lists with commas. */}}
{{- define "baton.text" -}}
{{- if kindIs "slice" . -}}
{{- join "," . -}}
{{- else if and (kindIs "float64" .) (eq (float64 (int64 .)) .) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* Flags of a map of settings, as a list. */}}
{{- define "baton.settingFlags" -}}
{{- range $name, $value := . }}
{{- if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%s" ($name | replace "_" "-") (include "baton.text" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}
