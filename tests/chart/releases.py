"""Sets of values that the chart must render, from none to all, each with the oldest Kubernetes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.chart.chart import OLDEST

IMAGE = {"repository": "registry.example/ai/baton", "tag": "0.1.0-cuda"}
MODEL: dict[str, Any] = {"id": "Qwen/Qwen3-8B", "sizeGi": 16, "cache": {"type": "hostPath"}}
RDMA: dict[str, Any] = {"path": "rdma", "interfaces": ["mlx5_0:1"]}
GPU: dict[str, Any] = {"device": "cuda", "rdma": {"resource": "rdma/hca_shared_devices_a"}}
POOLS: dict[str, Any] = {
    "prefill": {"role": "prefill", "replicas": 2},
    "decode": {"role": "decode", "replicas": 4},
}
METRIC = {
    "type": "Pods",
    "pods": {
        "metric": {"name": "baton_worker_waiting"},
        "target": {"type": "AverageValue", "averageValue": "4"},
    },
}
EXTRAS: dict[str, Any] = {
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "reserved", "operator": "Exists"}],
    "podAnnotations": {"example.com/team": "ai"},
    "podLabels": {"example.com/cost": "42"},
}
PROCESS_EXTRAS: dict[str, Any] = EXTRAS | {
    "priorityClassName": "serving",
    "env": [{"name": "EXAMPLE", "value": "1"}],
    "volumes": [{"name": "extra", "emptyDir": {}}],
    "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
            }
        }
    },
}


@dataclass(frozen=True)
class Release:
    """Values, and the oldest version of Kubernetes that takes them."""

    name: str
    values: dict[str, Any] = field(hash=False)
    since: str = OLDEST


def gpu(**more: Any) -> dict[str, Any]:
    """Ten lines of values that serve a model of one's own on cards, and more."""
    return {"image": IMAGE, "model": MODEL, "kv": RDMA, "workers": GPU, "pools": POOLS} | more


RELEASES = [
    Release("nothing", {}),
    Release(
        "cpu-over-tcp",
        {
            "image": {"repository": "registry.example/baton"},
            "model": {
                "pvc": {"claimName": "models", "path": "Qwen3-0.6B"},
                "sizeGi": 1.5,
                "cache": {"type": "emptyDir"},
            },
            "kv": {"path": "tcp"},
            "workers": {
                "settings": {"num_blocks": 2048, "kv_checksum": True, "cores": ["0-3", "8"]}
            },
            "router": {
                "settings": {"max_body_bytes": 33554432, "cors_origins": ["https://a", "*"]}
            },
        },
    ),
    Release("gpu-pools", gpu()),
    Release(
        "several-pools",
        gpu(
            pools={
                "h100-prefill": {"role": "prefill", "nodeSelector": {"card": "h100"}},
                "l40-prefill": {
                    "role": "prefill",
                    "nodeSelector": {"card": "l40"},
                    "replicas": 3,
                    "settings": {"chunk_max_tokens": 256},
                },
                "h200-decode": {
                    "role": "decode",
                    "image": {"tag": "other"},
                    "maxSurge": "25%",
                    "settings": {"resume_grace_s": 60},
                },
                "cpu-decode": {
                    "role": "decode",
                    "device": "cpu",
                    "resources": {
                        "requests": {"cpu": 8, "memory": "64Gi"},
                        "limits": {"cpu": "8", "memory": "64Gi"},
                    },
                },
            }
        ),
    ),
    Release(
        "one-worker",
        {
            "model": {
                "hostPath": {"path": "/models/Qwen3-0.6B"},
                "sizeGi": 1.5,
                "cache": {"type": "emptyDir"},
            },
            "pools": {"decode": {"role": "decode"}},
        },
    ),
    Release(
        "image-volume",
        gpu(
            model={
                "image": {"reference": "registry.example/models/qwen3:8b"},
                "sizeGi": 16,
                "cache": {"type": "pvc"},
            }
        ),
        since="1.31.0",
    ),
    Release(
        "dra",
        gpu(
            workers={
                "device": "cuda",
                "dra": {"deviceClass": "gpu.nvidia.com", "nicDeviceClass": "nic.example"},
            }
        ),
        since="1.34.0",
    ),
    Release(
        "dra-template",
        gpu(
            workers={
                "device": "cuda",
                "dra": {"claimTemplateName": "gpu-and-nic"},
            }
        ),
        since="1.34.0",
    ),
    Release(
        "rdma-domain",
        gpu(
            workers=GPU
            | {
                "topology": {"domainLabel": "network.example/rdma-domain"},
                "hugepages": {"size": "2Mi", "amount": "1Gi"},
                "shmSize": "8Gi",
                "runtimeClassName": "nvidia",
            }
        ),
    ),
    Release(
        "tiers",
        gpu(
            workers=GPU | {"tiers": {"host": "16Gi", "disk": {"size": "50Gi"}}},
            pools={
                "prefill": {
                    "role": "prefill",
                    "tiers": {"disk": {"type": "ephemeral", "storageClassName": "fast"}},
                },
                "decode": {
                    "role": "decode",
                    "tiers": {"disk": {"type": "pvc", "claimName": "blocks"}},
                },
                "other": {"role": "decode"},
            },
        ),
    ),
    Release(
        "tls-and-keys",
        gpu(
            secrets={"existingSecret": "our-secrets"},
            router={"tls": {"secretName": "our-certificate"}, "apiKeys": {"enabled": True}},
            serviceMonitor={"enabled": True},
            ingress={"enabled": True, "controller": "nginx", "path": "/llm", "host": "ai.example"},
        ),
    ),
    Release("preflight", gpu(preflight={"enabled": True, "pool": "decode", "pods": 3})),
    Release(
        "open",
        {
            "router": {"apiKeys": {"enabled": False}},
            "networkPolicy": {"enabled": False},
            "store": {"tls": {"enabled": False}},
        },
    ),
    Release(
        "external-store",
        gpu(
            store={
                "external": {
                    "urlSecret": {"name": "valkey", "key": "uri"},
                    "caSecret": {"name": "authorities", "key": "bundle.pem"},
                    "clientSecret": {"name": "client"},
                }
            },
            cluster="blue",
            preflight={"enabled": True},
        ),
    ),
    Release(
        "egress",
        gpu(
            model=MODEL | {"cache": {"type": "pvc", "prefetch": True}},
            kv={"path": "tcp"},
            networkPolicy={"egress": {"enabled": True, "rules": [{"ports": [{"port": 3128}]}]}},
            router={"settings": {"otlp_endpoint": "http://collector:4318/v1/traces"}},
        ),
    ),
    Release(
        "persistent-store",
        {
            "store": {
                "persistence": {"enabled": True, "size": "2Gi"},
                "tls": {"secretName": "store-certificate", "plainSeconds": 0},
            }
        },
    ),
    Release(
        "prefetch-pvc",
        gpu(
            model={
                "id": "Qwen/Qwen3-8B",
                "sizeGi": 16,
                "cache": {"type": "pvc", "prefetch": True, "pvc": {"storageClassName": "nfs"}},
                "hub": {
                    "tokenSecret": {"name": "hub", "key": "token"},
                    "endpoint": "https://mirror",
                },
            }
        ),
    ),
    Release("prefetch-nodes", gpu(model=MODEL | {"cache": {"type": "hostPath", "prefetch": True}})),
    Release(
        "monitoring",
        gpu(
            serviceMonitor={"enabled": True, "labels": {"release": "prometheus"}},
            prometheusRule={"enabled": True},
            grafana={"enabled": True},
            networkPolicy={
                "clients": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}],
                "metrics": [{"namespaceSelector": {"matchLabels": {"c": "d"}}}],
            },
        ),
    ),
    Release(
        "autoscaling",
        gpu(
            router={"autoscaling": {"enabled": True, "metrics": [METRIC]}},
            pools={
                "prefill": {
                    "role": "prefill",
                    "autoscaling": {
                        "type": "hpa",
                        "minReplicas": 1,
                        "maxReplicas": 8,
                        "metrics": [METRIC],
                    },
                },
                "decode": {
                    "role": "decode",
                    "autoscaling": {
                        "type": "keda",
                        "minReplicas": 2,
                        "maxReplicas": 16,
                        "triggers": [
                            {
                                "type": "prometheus",
                                "metadata": {"query": "sum(x)", "threshold": "4"},
                            }
                        ],
                    },
                },
            },
        ),
    ),
    Release(
        "gateway",
        gpu(
            httpRoute={
                "enabled": True,
                "parentRefs": [{"name": "gateway"}],
                "path": "/llm",
                "hostnames": ["ai.example"],
            },
            inferencePool={
                "enabled": True,
                "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
            },
        ),
    ),
    Release(
        "everything",
        gpu(
            nameOverride="llm",
            imagePullSecrets=[{"name": "registry"}],
            requestTimeoutSeconds=1200,
            logLevel="debug",
            listenAddress="[::]",
            router={
                "replicas": 3,
                "tls": {"secretName": "certificate"},
                "lameDuckSeconds": 30,
                "settings": {"max_inflight": 4096},
                "service": {"type": "LoadBalancer", "port": 8443, "annotations": {"a": "b"}},
                **PROCESS_EXTRAS,
            },
            workers=GPU | PROCESS_EXTRAS | {"envFrom": [{"configMapRef": {"name": "nccl"}}]},
            store={**PROCESS_EXTRAS, "persistence": {"enabled": True}},
            jobs=EXTRAS,
            serviceAccount={"annotations": {"example.com/role": "x"}},
            model=MODEL | {"cache": {"type": "hostPath", "hostPath": "/data", "prefetch": True}},
            serviceMonitor={"enabled": True},
            prometheusRule={"enabled": True},
            grafana={"enabled": True},
            ingress={
                "enabled": True,
                "className": "nginx",
                "controller": "nginx",
                "path": "/llm",
                "host": "ai.example",
                "tlsSecretName": "edge",
                "annotations": {"a": "b"},
            },
            httpRoute={"enabled": True, "parentRefs": [{"name": "gateway"}]},
            inferencePool={
                "enabled": True,
                "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
            },
            extraObjects=[
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}},
                "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-two\n",
            ],
        ),
    ),
    Release(
        "nodes",
        {
            "workers": {"tensorParallel": 2, "nodesPerWorker": 2, "maxSurge": "25%"},
            "pools": {"decode": {"role": "decode", "replicas": 2}},
            "kv": {"path": "tcp"},
            "networkPolicy": {"egress": {"enabled": True}},
            "preflight": {"enabled": True},
        },
    ),
]
