{{/* What values.schema.json cannot see: values that contradict each other, or the cluster. */}}

{{- define "baton.checks" -}}
{{- $wrong := list -}}
{{- range list "name" "model" "kv" "limit" "pool" "scaling" "integration" -}}
{{- $wrong = concat $wrong (include (printf "baton.%sChecks" .) $ | fromYamlArray) -}}
{{- end -}}
{{- if $wrong -}}
{{- printf "\n\nThe values need a change:\n- %s\n" (join "\n- " $wrong) | fail -}}
{{- end -}}
{{- end -}}

{{- define "baton.nameChecks" -}}
{{- $wrong := list -}}
{{- if eq (toString .Values.enabled) "false" -}}
{{- $wrong = append $wrong "enabled: only the condition of a parent chart reads it; `helm uninstall` takes a release away" -}}
{{- end -}}
{{- $full := .Values.fullnameOverride -}}
{{- if and $full (not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full)) -}}
{{- $name := $full | replace "." "-" -}}
{{- if not (regexMatch "^[a-z]" $name) -}}{{- $name = printf "baton-%s" $name -}}{{- end -}}
{{- $wrong = append $wrong (printf "fullnameOverride: %s cannot name a Service, whose name begins with a letter and has no dots; set %s" $full ($name | trunc 40 | trimSuffix "-")) -}}
{{- end -}}
{{- $volumes := dict "router.volumes" .Values.router.volumes "store.volumes" .Values.store.volumes -}}
{{- $labels := dict "router.podLabels" .Values.router.podLabels "store.podLabels" .Values.store.podLabels "jobs.podLabels" .Values.jobs.podLabels "serviceMonitor.labels" .Values.serviceMonitor.labels "prometheusRule.labels" .Values.prometheusRule.labels "grafana.labels" .Values.grafana.labels -}}
{{- $images := dict "image" .Values.image -}}
{{- range $pool, $values := include "baton.pools" . | fromYaml -}}
{{- $_ := set $images (printf "pools.%s.image" $pool) $values.image -}}
{{- $_ := set $labels (printf "pools.%s.podLabels" $pool) $values.podLabels -}}
{{- $_ := set $volumes (printf "pools.%s.volumes" $pool) $values.volumes -}}
{{- end -}}
{{- range $path, $image := $images -}}
{{- $name := default "" (default dict $image).repository -}}
{{- $tag := regexFind ":[^/]*$" $name -}}
{{- if $tag -}}
{{- $wrong = append $wrong (printf "%s.repository: %s ends in a tag, which has a value of its own; set %s.repository: %s and %s.tag: %s" $path $name $path (trimSuffix $tag $name) $path (trimPrefix ":" $tag)) -}}
{{- end -}}
{{- end -}}
{{- range $path, $given := $volumes -}}
{{- range $given -}}
{{- if has .name (list "tmp" "cache" "model" "tls" "shm" "hugepages" "tiers" "data" "store-tls" "store-ca" "store-client") -}}
{{- $wrong = append $wrong (printf "%s: the chart has its own volume %s; take another name" $path .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $path, $given := $labels -}}
{{- range $label, $_ := $given -}}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|instance|component|version|managed-by)|helm\\.sh/chart|baton-(pool|role|run))$" $label -}}
{{- $wrong = append $wrong (printf "%s: the chart sets %s itself, and selects pods by it; take another label" $path $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $wrong -}}
{{- end -}}

{{- define "baton.modelChecks" -}}
{{- $model := .Values.model -}}
{{- $cache := $model.cache -}}
{{- $wrong := list -}}
{{- $sources := list -}}
{{- range $name, $source := dict "model.id" $model.id "model.pvc" $model.pvc.claimName "model.hostPath" $model.hostPath.path "model.image" $model.image.reference -}}
{{- if $source -}}{{- $sources = append $sources $name -}}{{- end -}}
{{- end -}}
{{- if gt (len $sources) 1 -}}
{{- $wrong = append $wrong (printf "%s: a release serves one model from one place; keep one of them" (join ", " (sortAlpha $sources))) -}}
{{- end -}}
{{- if $sources -}}
{{- if not $model.sizeGi -}}
{{- $wrong = append $wrong "model.sizeGi: give the size of the weights in GiB; it sets the workers' memory, the cache's size and the deadline of a start" -}}
{{- end -}}
{{- if not $cache.type -}}
{{- $wrong = append $wrong "model.cache.type: say where downloaded weights and compiled kernels stay: hostPath (once per node), pvc (once per volume) or emptyDir (again in every pod)" -}}
{{- end -}}
{{- end -}}
{{- if and $model.revision (not $model.id) -}}
{{- $wrong = append $wrong "model.revision: only a model of the hub (model.id) has revisions" -}}
{{- end -}}
{{- if and $cache.prefetch (or (not $model.id) (not (has $cache.type (list "hostPath" "pvc")))) -}}
{{- $wrong = append $wrong "model.cache.prefetch: it needs model.id, and model.cache.type hostPath or pvc" -}}
{{- end -}}
{{- if and $model.image.reference (semverCompare "<1.31.0-0" .Capabilities.KubeVersion.Version) -}}
{{- $wrong = append $wrong (printf "model.image: image volumes need Kubernetes 1.31 or later, and this is %s; use model.pvc or model.hostPath" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- toYaml $wrong -}}
{{- end -}}

{{- define "baton.kvChecks" -}}
{{- $wrong := list -}}
{{- $path := include "baton.kvPath" . -}}
{{- $many := gt (include "baton.workerCount" . | int) 1 -}}
{{- if and $many (not $path) -}}
{{- $wrong = append $wrong "kv.path: say how KV blocks move between pods: rdma, or tcp, which is slower and trusts everyone who reaches the workers' KV ports" -}}
{{- end -}}
{{- if eq $path "rdma" -}}
{{- if not .Values.kv.interfaces -}}
{{- $wrong = append $wrong "kv.interfaces: name the RDMA ports for KV blocks, for example [mlx5_0:1]; `ibv_devices` on a node lists them" -}}
{{- end -}}
{{- range $name, $pool := include "baton.pools" . | fromYaml -}}
{{- if not (or $pool.rdma.resource (eq (include "baton.hasClaim" (dict "pool" $pool)) "true")) -}}
{{- $wrong = append $wrong (printf "pools.%s: kv.path is rdma, and its pods get no RDMA device; set workers.rdma.resource (kubectl describe node lists the resources), or workers.dra" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $wrong -}}
{{- end -}}

{{- define "baton.poolChecks" -}}
{{- $wrong := list -}}
{{- $decode := 0 -}}
{{- range $name, $pool := include "baton.pools" . | fromYaml -}}
{{- $scaling := $pool.autoscaling -}}
{{- if eq $pool.role "decode" -}}{{- $decode = add1 $decode -}}{{- end -}}
{{- if has $name (list "router" "store" "workers" "secrets" "cache" "prefetch" "test" "jobs" "preflight") -}}
{{- $wrong = append $wrong (printf "pools.%s: the chart uses this name itself; choose another" $name) -}}
{{- end -}}
{{- if and (eq $scaling.type "hpa") (not $scaling.metrics) -}}
{{- $wrong = append $wrong (printf "pools.%s.autoscaling.metrics: name the metrics that the HPA follows" $name) -}}
{{- end -}}
{{- if and (eq $scaling.type "keda") (not $scaling.triggers) -}}
{{- $wrong = append $wrong (printf "pools.%s.autoscaling.triggers: name the triggers that KEDA follows" $name) -}}
{{- end -}}
{{- if and $pool.hugepages.size (not $pool.hugepages.amount) -}}
{{- $wrong = append $wrong (printf "pools.%s.hugepages.amount: say how much memory, for example 1Gi" $name) -}}
{{- end -}}
{{- $tiers := $pool.tiers -}}
{{- $nodes := $pool.nodesPerWorker | int -}}
{{- if gt $nodes 1 -}}
{{- $ranks := include "baton.numRanks" (dict "pool" $pool) | int -}}
{{- $local := div $ranks $nodes | int -}}
{{- $tp := $pool.tensorParallel | int -}}
{{- if mod $ranks $nodes -}}
{{- $wrong = append $wrong (printf "pools.%s.nodesPerWorker: %d must divide the %d ranks of a worker (tensorParallel times pipelineParallel)" $name $nodes $ranks) -}}
{{- else if and (mod $local $tp) (mod $tp $local) -}}
{{- $wrong = append $wrong (printf "pools.%s.nodesPerWorker: %d ranks in each pod are neither whole stages of tensorParallel %d nor an equal part of one stage" $name $local $tp) -}}
{{- end -}}
{{- if ne $pool.device "cpu" -}}
{{- $wrong = append $wrong (printf "pools.%s.nodesPerWorker: ranks on cards lie on one node; set it to 1" $name) -}}
{{- end -}}
{{- if $pool.autoscaling.type -}}
{{- $wrong = append $wrong (printf "pools.%s.autoscaling: a pool of workers that span several nodes has a fixed size; set replicas" $name) -}}
{{- end -}}
{{- if $tiers.host -}}
{{- $wrong = append $wrong (printf "pools.%s.tiers: workers of several nodes have no tiers" $name) -}}
{{- end -}}
{{- end -}}
{{- if and $tiers.disk.size (not $tiers.host) -}}
{{- $wrong = append $wrong (printf "pools.%s.tiers.host: blocks reach the disk through host memory; say how much, for example 4Gi" $name) -}}
{{- end -}}
{{- if and $tiers.disk.size (eq $tiers.disk.type "pvc") (not $tiers.disk.claimName) -}}
{{- $wrong = append $wrong (printf "pools.%s.tiers.disk.claimName: name the claim that holds the blocks" $name) -}}
{{- end -}}
{{- $memory := dig "limits" "memory" "" (default dict $pool.resources) -}}
{{- if and $tiers.host $memory (ge (include "baton.bytes" $tiers.host | int64) (include "baton.bytes" $memory | int64)) -}}
{{- $wrong = append $wrong (printf "pools.%s.tiers.host: %s of host memory do not fit into resources.limits.memory, %s; raise the limit" $name (include "baton.text" $tiers.host) (include "baton.text" $memory)) -}}
{{- end -}}
{{- if and (eq (include "baton.hasClaim" (dict "pool" $pool)) "true") (semverCompare "<1.34.0-0" $.Capabilities.KubeVersion.Version) -}}
{{- $wrong = append $wrong (printf "pools.%s.dra: claims of devices (resource.k8s.io/v1) need Kubernetes 1.34 or later, and this is %s; use workers.gpu.resource and workers.rdma.resource" $name $.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.preflight.pool (not (hasKey (include "baton.pools" . | fromYaml) .Values.preflight.pool)) -}}
{{- $wrong = append $wrong (printf "preflight.pool: there is no pool %s" .Values.preflight.pool) -}}
{{- end -}}
{{- if .Values.preflight.enabled -}}
{{- $checked := include "baton.preflightPool" . -}}
{{- $nodes := dig $checked "nodesPerWorker" 1 (include "baton.pools" . | fromYaml) | int -}}
{{- if and (gt $nodes 1) (ne $nodes (.Values.preflight.pods | int)) -}}
{{- $wrong = append $wrong (printf "preflight.pods: its pods stand for those of one worker of the pool %s; set %d, its nodesPerWorker" $checked $nodes) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.podConditions (not .Values.podEvents) -}}
{{- $wrong = append $wrong "podConditions: workers write conditions as they write Events; set podEvents: true" -}}
{{- end -}}
{{- if and .Values.requirePrefill (not (include "baton.hasPrefill" .)) -}}
{{- $wrong = append $wrong "requirePrefill: there is no pool with role prefill, so no decode worker would ever be ready" -}}
{{- end -}}
{{- if not $decode -}}
{{- $wrong = append $wrong "pools: a release needs a pool with role decode; only decode workers generate tokens" -}}
{{- end -}}
{{- toYaml $wrong -}}
{{- end -}}

{{- define "baton.integrationChecks" -}}
{{- $wrong := list -}}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPickerRef.name) -}}
{{- $wrong = append $wrong "inferencePool.endpointPickerRef: name the Service of your endpoint picker, for example {name: epp, port: {number: 9002}}; an InferencePool is not valid without one" -}}
{{- end -}}
{{- with .Values.inferencePool -}}
{{- if and .enabled .endpointPickerRef.name (has (default "Service" .endpointPickerRef.kind) (list "Service")) (not .endpointPickerRef.port) -}}
{{- $wrong = append $wrong "inferencePool.endpointPickerRef.port: give the port of the picker's Service, for example {number: 9002}" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- $wrong = append $wrong "httpRoute.parentRefs: name the Gateway, for example [{name: gateway, namespace: gateways}]" -}}
{{- end -}}
{{- with .Values.ingress -}}
{{- if and .enabled (ne .path "/") (not .controller) (not .annotations) -}}
{{- $wrong = append $wrong (printf "ingress.path: the routers serve at /, so the controller must remove %s; set ingress.controller: nginx, or the annotations with which your controller rewrites paths" .path) -}}
{{- end -}}
{{- end -}}
{{- toYaml $wrong -}}
{{- end -}}
