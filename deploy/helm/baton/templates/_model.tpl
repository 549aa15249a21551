{{/* Where the checkpoint lies, and the volumes for it and for caches. */}}

{{/* The value of --model. The demo model is the one in the image. */}}
{{- define "baton.modelPath" -}}
{{- $model := .Values.model -}}
{{- if $model.id -}}
{{- $model.id -}}
{{- else if $model.pvc.claimName -}}
{{- printf "/model/%s" $model.pvc.path | trimSuffix "/" -}}
{{- else if $model.hostPath.path -}}
/model
{{- else if $model.image.reference -}}
{{- printf "/model/%s" $model.image.path | trimSuffix "/" -}}
{{- else -}}
/opt/baton/demo_model
{{- end -}}
{{- end -}}

{{/* --model, with --revision for a hub id, as a list. */}}
{{- define "baton.modelFlags" -}}
- {{ printf "--model=%s" (include "baton.modelPath" .) | quote }}
{{- with .Values.model.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
{{- end -}}

{{- define "baton.servedName" -}}
{{- $model := .Values.model -}}
{{- if $model.servedName -}}{{- $model.servedName -}}
{{- else if $model.id -}}{{- $model.id -}}
{{- else if and $model.pvc.claimName $model.pvc.path -}}{{- base $model.pvc.path -}}
{{- else if $model.pvc.claimName -}}{{- $model.pvc.claimName -}}
{{- else if $model.hostPath.path -}}{{- base $model.hostPath.path -}}
{{- else if and $model.image.reference $model.image.path -}}{{- base $model.image.path -}}
{{- else if $model.image.reference -}}{{- (splitList ":" (base $model.image.reference)) | first -}}
{{- else -}}demo_model{{- end -}}
{{- end -}}

{{- define "baton.claimName" -}}
{{- default (printf "%s-cache" (include "baton.fullname" .)) .Values.model.cache.pvc.existingClaim -}}
{{- end -}}

{{/* A size for a claim as a quantity: no less than the claim has where a cluster is in sight, since
none can shrink. dict "root" $ "name" the claim's "size" a quantity */}}
{{- define "baton.claimSize" -}}
{{- $claim := lookup "v1" "PersistentVolumeClaim" .root.Release.Namespace .name -}}
{{- $has := dig "spec" "resources" "requests" "storage" "0" $claim -}}
{{- $more := gt (include "baton.bytes" $has | int64) (include "baton.bytes" .size | int64) -}}
{{- ternary $has (include "baton.text" .size) $more -}}
{{- end -}}

{{/* Volumes of a process that reads the model. */}}
{{- define "baton.modelVolumes" -}}
{{- $model := .Values.model -}}
{{- $cache := $model.cache -}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: cache
{{- if eq $cache.type "hostPath" }}
  hostPath: {path: {{ $cache.hostPath | quote }}, type: Directory}
{{- else if eq $cache.type "pvc" }}
  persistentVolumeClaim: {claimName: {{ include "baton.claimName" . | quote }}}
{{- else }}
  emptyDir: {}
{{- end }}
{{- if $model.pvc.claimName }}
- name: model
  persistentVolumeClaim: {claimName: {{ $model.pvc.claimName | quote }}, readOnly: true}
{{- else if $model.hostPath.path }}
- name: model
  hostPath: {path: {{ $model.hostPath.path | quote }}, type: Directory}
{{- else if $model.image.reference }}
- name: model
  image: {reference: {{ $model.image.reference | quote }}, pullPolicy: {{ $model.image.pullPolicy }}}
{{- end }}
{{- end -}}

{{- define "baton.modelMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- if or .Values.model.pvc.claimName .Values.model.hostPath.path .Values.model.image.reference }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- end -}}

{{/* Environment of a process that reads the model: caches, and access to the hub. */}}
{{- define "baton.modelEnv" -}}
- {name: HOME, value: /tmp}
- {name: XDG_CACHE_HOME, value: /cache}
- {name: HF_HOME, value: /cache/huggingface}
{{- with .Values.model.hub.endpoint }}
- {name: HF_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- with .Values.model.hub.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- end -}}
