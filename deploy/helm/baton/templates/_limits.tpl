{{/* Ranges that values.schema.json cannot express, each refused with the value to set. */}}

{{/* Bytes of a quantity of memory, as 256Mi or 1.5G. */}}
{{- define "baton.bytes" -}}
{{- $text := include "baton.text" . -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $units := dict "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (trimSuffix $unit $text | float64) (default 1 (get $units $unit)) | floor | int64 -}}
{{- end -}}

{{- define "baton.limitChecks" -}}
{{- $wrong := list -}}
{{- if gt (.Values.requestTimeoutSeconds | int) 86400 -}}
{{- $wrong = append $wrong (printf "requestTimeoutSeconds: %d s are more than a day, which no proxy and no grace period of a pod allows; set 86400 or less" (.Values.requestTimeoutSeconds | int)) -}}
{{- end -}}
{{- toYaml (concat $wrong (include "baton.portChecks" . | fromYamlArray) (include "baton.storeChecks" . | fromYamlArray)) -}}
{{- end -}}

{{- define "baton.portChecks" -}}
{{- $wrong := list -}}
{{- $ports := .Values.kv.ports -}}
{{- $low := splitList "-" $ports | first | int -}}
{{- $high := splitList "-" $ports | last | int -}}
{{- if ge $low $high -}}
{{- $wrong = append $wrong (printf "kv.ports: %s is not a range of ports from low to high; set 41000-41099" $ports) -}}
{{- else if gt $high 65535 -}}
{{- $wrong = append $wrong (printf "kv.ports: %s ends beyond 65535, the last port; set %d-65535" $ports (min $low 65000)) -}}
{{- else if lt $low 1024 -}}
{{- $wrong = append $wrong (printf "kv.ports: %s begins below 1024, where pods that do not run as root may not listen; set 41000-41099" $ports) -}}
{{- end -}}
{{- range list "control" "events" "metrics" -}}
{{- $port := include "baton.port" . | int -}}
{{- if and (le $low $port) (ge $high $port) -}}
{{- $wrong = append $wrong (printf "kv.ports: %s includes %d, a worker's port for %s; set 41000-41099" $ports $port .) -}}
{{- end -}}
{{- end -}}
{{- toYaml $wrong -}}
{{- end -}}

{{/* Kept responses must fit into the chart's store: twice into its memory, beside what its connections
take, and four times into its folder, where the log of writes lies beside its successor. */}}
{{- define "baton.storeChecks" -}}
{{- $wrong := list -}}
{{- $settings := .Values.router.settings -}}
{{- $store := .Values.store -}}
{{- if and $settings.responses_store (not $store.external.urlSecret.name) -}}
{{- $kept := default 134217728 $settings.responses_store_bytes | int64 -}}
{{- $memory := dig "limits" "memory" "" $store.resources -}}
{{- if $memory -}}
{{- $bytes := include "baton.bytes" $memory | int64 -}}
{{- $others := 134217728 -}}
{{- if gt (add (mul 2 $kept) $others | int64) $bytes -}}
{{- $wrong = append $wrong (printf "router.settings.responses_store_bytes: %d bytes of kept responses need a store of twice the memory and 128 MiB; set store.resources.limits.memory: %dMi, or responses_store_bytes: %d" $kept (divf (add (mul 2 $kept) $others) 1048576 | ceil | int64) (max 1048576 (div (sub $bytes $others) 2))) -}}
{{- end -}}
{{- end -}}
{{- $disk := include "baton.bytes" $store.persistence.size | int64 -}}
{{- if gt (mul 4 $kept) $disk -}}
{{- $wrong = append $wrong (printf "router.settings.responses_store_bytes: the log of %d bytes of kept responses needs four times the space; set store.persistence.size: %dMi, or responses_store_bytes: %d" $kept (divf (mul 4 $kept) 1048576 | ceil | int64) (div $disk 4)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $wrong -}}
{{- end -}}

{{/* The workers that a pool keeps at least. */}}
{{- define "baton.leastWorkers" -}}
{{- ternary .autoscaling.minReplicas .replicas (not (empty .autoscaling.type)) | int -}}
{{- end -}}

{{/* Scaling to 0 that nothing could undo. */}}
{{- define "baton.scalingChecks" -}}
{{- $wrong := list -}}
{{- $pools := include "baton.pools" . | fromYaml -}}
{{- $kept := dict "prefill" 0 "decode" 0 -}}
{{- range $pool := $pools -}}
{{- $_ := set $kept $pool.role (add (get $kept $pool.role) (include "baton.leastWorkers" $pool | int)) -}}
{{- end -}}
{{- range $name, $pool := $pools -}}
{{- $scaling := $pool.autoscaling -}}
{{- if and $scaling.type (not (int $scaling.minReplicas)) -}}
{{- if eq $scaling.type "hpa" -}}
{{- $wrong = append $wrong (printf "pools.%s.autoscaling.minReplicas: an HPA does not scale to 0; set 1, or type keda" $name) -}}
{{- else if and (eq $pool.role "decode") (not (get $kept "decode")) -}}
{{- $wrong = append $wrong (printf "pools.%s.autoscaling.minReplicas: without any decode worker routers refuse all requests, so no trigger would ever wake one; set 1" $name) -}}
{{- else if and $.Values.requirePrefill (eq $pool.role "prefill") (not (get $kept "prefill")) -}}
{{- $wrong = append $wrong (printf "pools.%s.autoscaling.minReplicas: with requirePrefill no decode worker is ready without a prefill worker; set 1" $name) -}}
{{- end -}}
{{- end -}}
{{- if and $scaling.type (lt ($scaling.maxReplicas | int) ($scaling.minReplicas | int)) -}}
{{- $wrong = append $wrong (printf "pools.%s.autoscaling: maxReplicas is less than minReplicas; set maxReplicas: %d or more" $name ($scaling.minReplicas | int)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.router.autoscaling -}}
{{- if and .enabled (lt (.maxReplicas | int) (.minReplicas | int)) -}}
{{- $wrong = append $wrong (printf "router.autoscaling: maxReplicas is less than minReplicas; set maxReplicas: %d or more" (.minReplicas | int)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $wrong -}}
{{- end -}}
