{{/* How routers, workers and the preflight Job reach the store, and whom they trust. */}}

{{/* Whether the chart's store serves clients without TLS, too: those of an earlier chart, or all. */}}
{{- define "baton.storeServesPlain" -}}
{{- $tls := .Values.store.tls -}}
{{- if or (not $tls.enabled) (gt (int $tls.plainSeconds) 0) -}}true{{- end -}}
{{- end -}}

{{/* The ports of the chart's store, as a list. */}}
{{- define "baton.storePorts" -}}
{{- $ports := list (include "baton.port" "store-tls") -}}
{{- if include "baton.storeServesPlain" . -}}
{{- $ports = append $ports (include "baton.port" "store") -}}
{{- end -}}
{{- toYaml $ports -}}
{{- end -}}

{{/* The Secrets with what clients need to check a certificate, and with their own: dict "ca" "caKey"
"client", each empty if there is none. */}}
{{- define "baton.storeSecrets" -}}
{{- $external := .Values.store.external -}}
{{- $tls := .Values.store.tls -}}
{{- $found := dict "ca" "" "caKey" "ca.crt" "client" "" -}}
{{- if $external.urlSecret.name -}}
{{- $found = dict "ca" $external.caSecret.name "caKey" $external.caSecret.key "client" $external.clientSecret.name -}}
{{- else if and $tls.enabled $tls.secretName -}}
{{- $_ := set $found "ca" $tls.secretName -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{- define "baton.storeEnv" -}}
{{- $secrets := include "baton.storeSecrets" . | fromYaml -}}
{{- $tls := .Values.store.tls -}}
{{- if .Values.store.external.urlSecret.name }}
- name: BATON_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.store.external.urlSecret.name | quote }}, key: {{ .Values.store.external.urlSecret.key | quote }}}}
{{- else }}
{{- $url := printf "%s-store:%s/0" (include "baton.fullname" .) (include "baton.port" (ternary "store-tls" "store" $tls.enabled)) }}
- name: BATON_STORE_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "baton.secretName" . | quote }}, key: store-password}}
- {name: BATON_REDIS_URL, value: {{ printf "%s://:$(BATON_STORE_PASSWORD)@%s%s" (ternary "rediss" "redis" $tls.enabled) $url (ternary "?trust=password" "" (and $tls.enabled (not $tls.secretName))) | quote }}}
{{- end }}
{{- if $secrets.ca }}
- {name: BATON_REDIS_CA_FILE, value: /etc/baton/store-ca/ca.crt}
{{- end }}
{{- if $secrets.client }}
- {name: BATON_REDIS_CERT_FILE, value: /etc/baton/store-client/tls.crt}
- {name: BATON_REDIS_KEY_FILE, value: /etc/baton/store-client/tls.key}
{{- end }}
{{- end -}}

{{- define "baton.storeMounts" -}}
{{- $secrets := include "baton.storeSecrets" . | fromYaml -}}
{{- if $secrets.ca }}
- {name: store-ca, mountPath: /etc/baton/store-ca, readOnly: true}
{{- end }}
{{- if $secrets.client }}
- {name: store-client, mountPath: /etc/baton/store-client, readOnly: true}
{{- end }}
{{- end -}}

{{- define "baton.storeVolumes" -}}
{{- $secrets := include "baton.storeSecrets" . | fromYaml -}}
{{- if $secrets.ca }}
- name: store-ca
  secret: {secretName: {{ $secrets.ca | quote }}, items: [{key: {{ $secrets.caKey | quote }}, path: ca.crt}]}
{{- end }}
{{- if $secrets.client }}
- name: store-client
  secret: {secretName: {{ $secrets.client | quote }}}
{{- end }}
{{- end -}}
