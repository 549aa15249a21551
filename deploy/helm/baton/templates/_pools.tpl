{{/* The pools of workers, each merged with `workers`, and what follows from the model's size. */}}

{{- define "baton.pools" -}}
{{- $pools := .Values.pools -}}
{{- if not $pools -}}
{{- $pools = dict "prefill" (dict "role" "prefill") "decode" (dict "role" "decode") -}}
{{- end -}}
{{- $merged := dict -}}
{{- range $name, $pool := $pools -}}
{{- if not (kindIs "invalid" $pool) -}}
{{- $_ := set $merged $name (mustMergeOverwrite (deepCopy $.Values.workers) (deepCopy $pool)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $merged -}}
{{- end -}}

{{/* Whether there is a pool of prefill workers. */}}
{{- define "baton.hasPrefill" -}}
{{- $has := "" -}}
{{- range $pool := include "baton.pools" . | fromYaml -}}
{{- if eq $pool.role "prefill" -}}{{- $has = "true" -}}{{- end -}}
{{- end -}}
{{- $has -}}
{{- end -}}

{{/* The pool whose nodes the preflight Job checks. */}}
{{- define "baton.preflightPool" -}}
{{- default (keys (include "baton.pools" . | fromYaml) | sortAlpha | first) .Values.preflight.pool -}}
{{- end -}}

{{/* Processes of a worker that its model is split over: dict "pool". */}}
{{- define "baton.numRanks" -}}
{{- mul (.pool.tensorParallel | int) (.pool.pipelineParallel | int) -}}
{{- end -}}

{{/* Those of them in each of its pods: dict "pool". */}}
{{- define "baton.podRanks" -}}
{{- div (include "baton.numRanks" . | int) (.pool.nodesPerWorker | int) -}}
{{- end -}}

{{/* Workers of a pool at most, while they are replaced: dict "pool". */}}
{{- define "baton.mostReplicas" -}}
{{- $replicas := .pool.replicas | int -}}
{{- $surge := include "baton.text" .pool.maxSurge -}}
{{- if hasSuffix "%" $surge -}}
{{- add $replicas (divf (mul $replicas (trimSuffix "%" $surge | int)) 100 | ceil | int) -}}
{{- else -}}
{{- add $replicas ($surge | int) -}}
{{- end -}}
{{- end -}}

{{/* Whether some worker has several: all then keep blocks in an order that can be split. */}}
{{- define "baton.hasRanks" -}}
{{- $has := "" -}}
{{- range $pool := include "baton.pools" . | fromYaml -}}
{{- if gt (include "baton.numRanks" (dict "pool" $pool) | int) 1 -}}{{- $has = "true" -}}{{- end -}}
{{- end -}}
{{- $has -}}
{{- end -}}

{{/* The flags that tell a pool's workers the ranks of those that they exchange KV with, if another
pool divides heads in another way: dict "root" "pool" */}}
{{- define "baton.peerFlags" -}}
{{- $flags := "" -}}
{{- range $pool := include "baton.pools" .root | fromYaml -}}
{{- $differs := ne ($pool.tensorParallel | int) ($.pool.tensorParallel | int) -}}
{{- if and $differs (ne $pool.role $.pool.role) (not $flags) -}}
{{- $flags = printf "- --peer-tensor-parallel=%d\n- --peer-pipeline-parallel=%d" ($pool.tensorParallel | int) ($pool.pipelineParallel | int) -}}
{{- end -}}
{{- end -}}
{{- $flags -}}
{{- end -}}

{{/* Whether a pool's workers write Events: decode workers, about prefill workers. dict "root" "pool" */}}
{{- define "baton.writesEvents" -}}
{{- if and .root.Values.podEvents (eq .pool.role "decode") (include "baton.hasPrefill" .root) -}}true{{- end -}}
{{- end -}}

{{/* Pods that a Deployment with an autoscaler has: those that run, where a cluster is in sight, so that
an upgrade changes nothing; at least its minimum. dict "root" $ "name" its name "least" a number */}}
{{- define "baton.scaledReplicas" -}}
{{- $deployment := lookup "apps/v1" "Deployment" .root.Release.Namespace .name -}}
{{- max (dig "spec" "replicas" 0 $deployment | int) (.least | int) -}}
{{- end -}}

{{/* How many workers there are at most. */}}
{{- define "baton.workerCount" -}}
{{- $count := 0 -}}
{{- range $pool := include "baton.pools" . | fromYaml -}}
{{- $count = add $count (ternary $pool.autoscaling.maxReplicas $pool.replicas (not (empty $pool.autoscaling.type)) | int) -}}
{{- end -}}
{{- $count -}}
{{- end -}}

{{- define "baton.isDemo" -}}
{{- $model := .Values.model -}}
{{- if not (or $model.id $model.pvc.claimName $model.hostPath.path $model.image.reference) -}}true{{- end -}}
{{- end -}}

{{/* rdma or tcp; tcp for the demo model if nothing is said. */}}
{{- define "baton.kvPath" -}}
{{- default (ternary "tcp" "" (eq (include "baton.isDemo" .) "true")) .Values.kv.path -}}
{{- end -}}

{{/* Whether a pool claims devices by DRA: dict "pool". */}}
{{- define "baton.hasClaim" -}}
{{- if or .pool.dra.claimTemplateName .pool.dra.deviceClass .pool.dra.nicDeviceClass -}}true{{- end -}}
{{- end -}}

{{- define "baton.startupSeconds" -}}
{{- if .pool.startupSeconds -}}
{{- .pool.startupSeconds | int -}}
{{- else -}}
{{- add 300 (mulf 30 .root.Values.model.sizeGi | ceil | int) -}}
{{- end -}}
{{- end -}}

{{/* Whether a worker's disk tier lies on the node's own disk: dict "pool". */}}
{{- define "baton.hasNodeDisk" -}}
{{- $disk := .pool.tiers.disk -}}
{{- if and $disk.size (eq $disk.type "emptyDir") -}}true{{- end -}}
{{- end -}}

{{/* Mebibytes of a volume for a pool's disk tier: a tenth more than blocks may take. */}}
{{- define "baton.tierVolumeMi" -}}
{{- mulf 1.1 (divf (include "baton.bytes" .tiers.disk.size | int64) 1048576) | ceil | int -}}
{{- end -}}

{{/* Resources of a worker: those of the pool, or from device and model, and the devices. */}}
{{- define "baton.workerResources" -}}
{{- $size := divf .root.Values.model.sizeGi (.pool.nodesPerWorker | float64) -}}
{{- $cpu := eq .pool.device "cpu" -}}
{{- $ranks := include "baton.podRanks" . | int -}}
{{- $host := divf (include "baton.bytes" .pool.tiers.host | int64) 1048576 -}}
{{- $memory := printf "%dMi" (addf $host (mul 1024 (sub $ranks 1)) (ternary (addf 2048 (mulf 2048 $size)) (addf 4096 (mulf 1280 $size)) $cpu) | ceil | int) -}}
{{- $default := dict "requests" (dict "cpu" (ternary (toString $ranks) "4" $cpu) "memory" $memory) "limits" (dict "memory" $memory) -}}
{{- if $cpu -}}{{- $_ := set $default.limits "cpu" (mul 2 $ranks | toString) -}}{{- end -}}
{{- $resources := ternary $default (deepCopy (default dict .pool.resources)) (empty .pool.resources) -}}
{{- $limits := default dict (get $resources "limits") -}}
{{- if eq (include "baton.hasClaim" .) "true" -}}
{{- $_ := set $resources "claims" (list (dict "name" "devices")) -}}
{{- else -}}
{{- if not $cpu -}}{{- $_ := set $limits .pool.gpu.resource $ranks -}}{{- end -}}
{{- if and .pool.rdma.resource (eq (include "baton.kvPath" .root) "rdma") -}}
{{- $_ := set $limits .pool.rdma.resource (.pool.rdma.count | int) -}}
{{- end -}}
{{- end -}}
{{- if .pool.hugepages.size -}}
{{- $_ := set $limits (printf "hugepages-%s" .pool.hugepages.size) .pool.hugepages.amount -}}
{{- end -}}
{{- if include "baton.hasNodeDisk" . -}}
{{- $requests := default dict (get $resources "requests") -}}
{{- $disk := printf "%dMi" (add 1024 (include "baton.tierVolumeMi" .pool | int)) -}}
{{- if not (get $limits "ephemeral-storage") -}}{{- $_ := set $limits "ephemeral-storage" $disk -}}{{- end -}}
{{- if not (get $requests "ephemeral-storage") -}}{{- $_ := set $requests "ephemeral-storage" $disk -}}{{- end -}}
{{- $_ := set $resources "requests" $requests -}}
{{- end -}}
{{- $_ := set $resources "limits" $limits -}}
{{- toYaml $resources -}}
{{- end -}}
