{{/* Names, labels, images and the ports that the chart fixes. */}}

{{/* What all objects' names begin with: a label of DNS-1035, as names of Services are, of 40
characters at most. A name that had to be changed for that ends in a hash, so that no two become one. */}}
{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $wanted := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- $name := regexReplaceAll "[^-a-z0-9]" (lower $wanted) "-" -}}
{{- if not (regexMatch "^[a-z]" $name) -}}{{- $name = printf "baton-%s" $name -}}{{- end -}}
{{- if or (ne $name $wanted) (gt (len $name) 40) -}}
{{- $name = printf "%s-%s" ($name | trunc 31 | trimSuffix "-") ($wanted | sha256sum | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}
{{- end -}}

{{/* Name of a Job: dict "root" $ "part" "prefetch" "spec" its spec as text. The template of a Job
cannot change, so another spec is another Job, and Helm removes the former one. */}}
{{- define "baton.jobName" -}}
{{- printf "%s-%s-%s" (include "baton.fullname" .root) .part (.spec | sha256sum | trunc 8) -}}
{{- end -}}

{{- define "baton.cluster" -}}
{{- default (include "baton.fullname" .) .Values.cluster -}}
{{- end -}}

{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" | quote }}
{{- end -}}

{{/* The ports: http, control, events, metrics, probes, store (without TLS), store-tls. */}}
{{- define "baton.port" -}}
{{- get (dict "http" 8000 "control" 7400 "events" 7401 "metrics" 9400 "probes" 9401 "ranks" 29500 "store" 6379 "store-tls" 6380) . -}}
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

{{/* The path under which clients see the routers; those have another one if router.settings names it. */}}
{{- define "baton.rootPath" -}}
{{- if .Values.ingress.enabled -}}
{{- trimSuffix "/" .Values.ingress.path -}}
{{- else if .Values.httpRoute.enabled -}}
{{- trimSuffix "/" .Values.httpRoute.path -}}
{{- end -}}
{{- end -}}

{{/* The names under which clients reach routers without keys, which answer under no other name. With
keys router.settings alone says whether names count. */}}
{{- define "baton.allowedHosts" -}}
{{- $hosts := default list .Values.router.settings.allowed_hosts -}}
{{- $keys := .Values.router.apiKeys.enabled -}}
{{- range .Values.router.env -}}
{{- if has .name (list "BATON_API_KEYS" "BATON_API_KEY_FILE") -}}{{- $keys = true -}}{{- end -}}
{{- end -}}
{{- if not $keys -}}
{{- $name := include "baton.fullname" . -}}
{{- $own := list $name -}}
{{- range list "%s.%s" "%s.%s.svc" "%s.%s.svc.cluster.local" -}}
{{- $own = append $own (printf . $name $.Release.Namespace) -}}
{{- end -}}
{{- if and .Values.ingress.enabled .Values.ingress.host -}}{{- $own = append $own .Values.ingress.host -}}{{- end -}}
{{- if .Values.httpRoute.enabled -}}{{- $own = concat $own .Values.httpRoute.hostnames -}}{{- end -}}
{{- $hosts = concat $own $hosts | uniq -}}
{{- end -}}
{{- toYaml $hosts -}}
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

{{/* A map of labels, annotations or the like: numbers and booleans become the strings that they must
be, and null takes an entry away. */}}
{{- define "baton.strings" -}}
{{- $strings := dict -}}
{{- range $key, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}{{- $_ := set $strings $key (include "baton.text" $value) -}}{{- end -}}
{{- end -}}
{{- toYaml $strings -}}
{{- end -}}

{{/* Flags of a map of settings, as a list. */}}
{{- define "baton.settingFlags" -}}
{{- range $name, $value := . }}
{{- if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%s" ($name | replace "_" "-") (include "baton.text" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}
