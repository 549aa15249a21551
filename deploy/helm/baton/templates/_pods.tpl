{{/* What pods share. Each template takes dict "root" $ "values" V, where V has the fields of a pod
in values.yaml (nodeSelector, tolerations, env, ...). */}}

{{/* No version among the labels: pods roll when what they run changes, not with the chart's number. */}}
{{- define "baton.podMeta" -}}
labels:
  {{- include "baton.selector" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .values.podLabels }}
  {{- include "baton.strings" . | nindent 2 }}
  {{- end }}
{{- with .values.podAnnotations }}
annotations:
  {{- include "baton.strings" . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "baton.podBasics" -}}
enableServiceLinks: false
automountServiceAccountToken: {{ default false .token }}
serviceAccountName: {{ printf "%s-%s" (include "baton.fullname" .root) .account | quote }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- include "baton.strings" . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "baton.tolerations" -}}
{{- with . }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "baton.affinity" -}}
{{- with . }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* dict "given" list "labels" selector (text): the given constraints, or one over nodes. */}}
{{- define "baton.spread" -}}
topologySpreadConstraints:
{{- if .given }}
  {{- toYaml .given | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    matchLabelKeys: [pod-template-hash]
    labelSelector:
      matchLabels:
        {{- .labels | nindent 8 }}
{{- end }}
{{- end -}}

{{/* "ipcLock": RDMA pins memory. A container that does not run as root gets a capability only from
the file that it executes; the image's Python has none, so nodes also need an unlimited memlock. */}}
{{- define "baton.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if .ipcLock }}
    add: [IPC_LOCK]
    {{- end }}
terminationMessagePolicy: FallbackToLogsOnError
{{- end -}}

{{/* Secrets of a member of the fleet, in its environment. */}}
{{- define "baton.memberEnv" -}}
- name: BATON_CLUSTER_SECRET
  valueFrom: {secretKeyRef: {name: {{ include "baton.secretName" . | quote }}, key: cluster-secret}}
{{- include "baton.storeEnv" . }}
{{- end -}}

{{/* Variables of a process; the value of one is a string, whatever YAML reads it as. */}}
{{- define "baton.extraEnv" -}}
{{- $env := list -}}
{{- range .env -}}
{{- $env = append $env (kindIs "invalid" .value | ternary . (merge (dict "value" (include "baton.text" .value)) .)) -}}
{{- end -}}
{{- with $env }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.envFrom" -}}
{{- with . }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
