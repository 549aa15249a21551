{{/* The pod of one worker: dict "root" $ "name" pool's name "pool" merged values. A workload of
several pods per worker can use it as the Deployment does. */}}

{{- define "baton.workerLabels" -}}
{{ include "baton.selector" .root }}
app.kubernetes.io/component: worker
baton-pool: {{ .name | quote }}
{{- end -}}

{{- define "baton.workerAffinity" -}}
{{- $affinity := deepCopy (default dict .pool.affinity) -}}
{{- with .pool.topology.domainLabel -}}
{{- $own := default dict $affinity.podAffinity -}}
{{- $labels := printf "%s\napp.kubernetes.io/component: worker" (include "baton.selector" $.root) | fromYaml -}}
{{- $term := dict "topologyKey" . "labelSelector" (dict "matchLabels" $labels) -}}
{{- $terms := append (default list $own.requiredDuringSchedulingIgnoredDuringExecution) $term -}}
{{- $_ := set $affinity "podAffinity" (set $own "requiredDuringSchedulingIgnoredDuringExecution" $terms) -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{/* How KV blocks move, as flags. A single worker needs no interface but loopback. */}}
{{- define "baton.kvArgs" -}}
{{- $path := include "baton.kvPath" . -}}
{{- if eq $path "rdma" }}
- {{ printf "--kv-interface=%s" (join "," .Values.kv.interfaces) | quote }}
{{- else if eq $path "tcp" }}
- {{ printf "--kv-interface=%s" (default "eth0" (join "," .Values.kv.interfaces)) | quote }}
- --allow-kv-over-tcp
- {{ printf "--kv-ports=%s" .Values.kv.ports | quote }}
{{- else }}
- --kv-interface=lo
- {{ printf "--kv-ports=%s" .Values.kv.ports | quote }}
{{- end }}
{{- end -}}

{{- define "baton.workerTolerations" -}}
{{- $tolerations := .pool.tolerations -}}
{{- if eq .pool.device "cuda" -}}
{{- $tolerations = append $tolerations (dict "key" .pool.gpu.resource "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- include "baton.tolerations" $tolerations -}}
{{- end -}}

{{- define "baton.workerClaims" -}}
{{- if eq (include "baton.hasClaim" .) "true" }}
resourceClaims:
  - name: devices
    resourceClaimTemplateName: {{ default (printf "%s-%s" (include "baton.fullname" .root) .name) .pool.dra.claimTemplateName | quote }}
{{- end }}
{{- end -}}

{{- define "baton.workerArgs" -}}
{{ include "baton.modelFlags" .root }}
- {{ printf "--served-model-name=%s" (include "baton.servedName" .root) | quote }}
- {{ printf "--cluster=%s" (include "baton.cluster" .root) | quote }}
- {{ printf "--device=%s" .pool.device | quote }}
{{- if gt (.pool.tensorParallel | int) 1 }}
- {{ printf "--tensor-parallel=%d" (.pool.tensorParallel | int) | quote }}
{{- end }}
{{- if gt (.pool.pipelineParallel | int) 1 }}
- {{ printf "--pipeline-parallel=%d" (.pool.pipelineParallel | int) | quote }}
{{- end }}
{{- if gt (.pool.nodesPerWorker | int) 1 }}
- {{ printf "--master-port=%s" (include "baton.port" "ranks") | quote }}
- {{ printf "--join-s=%s" (include "baton.startupSeconds" .) | quote }}
{{- end }}
{{- with include "baton.peerFlags" . }}
{{ . }}
{{- end }}
{{- if and (include "baton.hasRanks" .root) (not .pool.settings.kv_order) }}
- --kv-order=pairs
{{- end }}
- {{ printf "--host=%s" .root.Values.listenAddress | quote }}
- {{ printf "--control-port=%s" (include "baton.port" "control") | quote }}
- {{ printf "--events-port=%s" (include "baton.port" "events") | quote }}
- {{ printf "--metrics-port=%s" (include "baton.port" "metrics") | quote }}
- {{ printf "--probe-port=%s" (include "baton.port" "probes") | quote }}
- {{ printf "--request-deadline-s=%d" (.root.Values.requestTimeoutSeconds | int) | quote }}
- {{ printf "--drain-grace-s=%d" (.root.Values.requestTimeoutSeconds | int) | quote }}
- {{ printf "--log-level=%s" .root.Values.logLevel | quote }}
- --log-format=json
{{- if and .root.Values.requirePrefill (eq .pool.role "decode") }}
- --require-prefill
{{- end }}
{{- if and .root.Values.podConditions (include "baton.writesEvents" .) }}
- --pod-conditions
{{- end }}
{{- with .pool.tiers }}
{{- if .host }}
- {{ printf "--host-tier-bytes=%s" (include "baton.bytes" .host) | quote }}
{{- end }}
{{- if .disk.size }}
- {{ printf "--disk-tier-bytes=%s" (include "baton.bytes" .disk.size) | quote }}
- --disk-tier-dir=/tiers
{{- end }}
{{- end }}
{{ include "baton.kvArgs" .root }}
{{- include "baton.settingFlags" .pool.settings }}
{{- end -}}

{{- define "baton.workerEnv" -}}
- name: BATON_WORKER_ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: BATON_ADVERTISE_ADDRESS
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: BATON_DEPLOYMENT_REVISION
  {{- $label := ternary "leaderworkerset.sigs.k8s.io/template-revision-hash" "pod-template-hash" (gt (.pool.nodesPerWorker | int) 1) }}
  valueFrom: {fieldRef: {fieldPath: {{ printf "metadata.labels['%s']" $label | quote }}}}
{{- if include "baton.writesEvents" . }}
- name: BATON_POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: BATON_POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
{{- end }}
{{- if eq .pool.device "cpu" }}
- name: BATON_TORCH_THREADS
  valueFrom: {resourceFieldRef: {containerName: worker, resource: limits.cpu, divisor: "1"}}
{{- else }}
- {name: FLASHINFER_WORKSPACE_BASE, value: /cache}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
{{- end }}
{{ include "baton.memberEnv" .root }}
{{ include "baton.modelEnv" .root }}
{{- end -}}

{{- define "baton.workerPod" -}}
{{- $pool := .pool -}}
{{- $rdma := eq (include "baton.kvPath" .root) "rdma" -}}
{{- $seconds := include "baton.startupSeconds" . | int -}}
{{- include "baton.podBasics" (dict "root" .root "account" "worker" "token" (eq (include "baton.writesEvents" .) "true") "values" $pool) }}
{{ include "baton.workerTolerations" . }}
{{ include "baton.affinity" (include "baton.workerAffinity" . | fromYaml) }}
{{ include "baton.spread" (dict "given" $pool.topologySpreadConstraints "labels" (include "baton.workerLabels" .)) }}
# SIGTERM is the drain: a worker hands its requests over, or finishes them, and leaves earlier.
terminationGracePeriodSeconds: {{ add .root.Values.requestTimeoutSeconds 30 }}
{{- include "baton.workerClaims" . }}
containers:
  - name: worker
    image: {{ include "baton.image" (dict "root" .root "device" $pool.device "image" $pool.image) }}
    imagePullPolicy: {{ include "baton.pullPolicy" (dict "root" .root "image" $pool.image) }}
    command: [baton, {{ $pool.role }}]
    args:
      {{- include "baton.workerArgs" . | nindent 6 }}
    env:
      {{- include "baton.workerEnv" . | nindent 6 }}
      {{- include "baton.extraEnv" $pool | nindent 6 }}
    {{- include "baton.envFrom" $pool.envFrom | nindent 4 }}
    ports:
      - {name: control, containerPort: {{ include "baton.port" "control" }}, protocol: TCP}
      - {name: events, containerPort: {{ include "baton.port" "events" }}, protocol: TCP}
      - {name: metrics, containerPort: {{ include "baton.port" "metrics" }}, protocol: TCP}
      - {name: probes, containerPort: {{ include "baton.port" "probes" }}, protocol: TCP}
      {{- if gt ($pool.nodesPerWorker | int) 1 }}
      - {name: ranks, containerPort: {{ include "baton.port" "ranks" }}, protocol: TCP}
      {{- end }}
    startupProbe:
      httpGet: {path: /startup, port: probes}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: {{ div (add $seconds 4) 5 }}
    readinessProbe:
      httpGet: {path: /ready, port: probes}
      periodSeconds: 2
      timeoutSeconds: 5
      failureThreshold: 3
    livenessProbe:
      httpGet: {path: /live, port: probes}
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: 6
    resources:
      {{- include "baton.workerResources" . | nindent 6 }}
    {{- include "baton.containerSecurity" (dict "ipcLock" $rdma) | nindent 4 }}
    volumeMounts:
      {{- include "baton.modelMounts" .root | nindent 6 }}
      {{- include "baton.storeMounts" .root | nindent 6 }}
      - {name: shm, mountPath: /dev/shm}
      {{- if $pool.hugepages.size }}
      - {name: hugepages, mountPath: /dev/hugepages}
      {{- end }}
      {{- if $pool.tiers.disk.size }}
      - {name: tiers, mountPath: /tiers}
      {{- end }}
      {{- with $pool.volumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  {{- include "baton.modelVolumes" .root | nindent 2 }}
  {{- include "baton.storeVolumes" .root | nindent 2 }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ include "baton.text" $pool.shmSize | quote }}}
  {{- if $pool.hugepages.size }}
  - name: hugepages
    emptyDir: {medium: {{ printf "HugePages-%s" $pool.hugepages.size }}}
  {{- end }}
  {{- with $pool.tiers.disk }}
  {{- if .size }}
  - name: tiers
    {{- $size := printf "%sMi" (include "baton.tierVolumeMi" $pool) }}
    {{- if eq .type "emptyDir" }}
    emptyDir: {sizeLimit: {{ $size | quote }}}
    {{- else if eq .type "ephemeral" }}
    ephemeral:
      volumeClaimTemplate:
        spec:
          accessModes: [ReadWriteOnce]
          {{- with .storageClassName }}
          storageClassName: {{ . | quote }}
          {{- end }}
          resources: {requests: {storage: {{ $size | quote }}}}
    {{- else }}
    persistentVolumeClaim: {claimName: {{ .claimName | quote }}}
    {{- end }}
  {{- end }}
  {{- end }}
  {{- with $pool.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
