"""Pods start processes with flags and variables that these know, and accept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from cli.commands import COMMANDS, settings_classes
from process.settings import load_settings
from process.settings.spec import specs_of
from tests.chart.chart import Object, objects, pod_templates
from tests.chart.releases import MODEL, PROCESS_EXTRAS, RELEASES, Release, gpu
from tests.paths import ROOT

SECRETS = {
    "BATON_CLUSTER_SECRET": "a-secret-of-more-than-16",
    "BATON_REDIS_URL": "rediss://:password@valkey:6380/1",
    "BATON_STORE_PASSWORD": "a-password-of-the-store",
    "BATON_API_KEYS": "baton-a-key-of-clients-1,baton-a-key-of-clients-2",
    "BATON_API_KEY": "baton-a-key-of-clients-1",
    "BATON_ADMIN_KEYS": "baton-a-key-of-operators",
    "BATON_VIEWER_KEYS": "baton-a-key-of-those-who-look",
    "HF_TOKEN": "hf_token",
}
FIELDS = {
    "metadata.name": "demo-baton-decode-6d4cf56db6-x2x9z",
    "metadata.uid": "7f0c9e3b-4f0e-4a55-9c2e-0d9b8f7e6a51",
    "status.podIP": "10.1.2.3",
    "metadata.labels['pod-template-hash']": "6d4cf56db6",
}
_AS_IN_DEPLOYMENTS = {
    "metadata.labels['leaderworkerset.sigs.k8s.io/template-revision-hash']": (
        "metadata.labels['pod-template-hash']"
    )
}
HUB_NAMES = "".join(
    (Path(huggingface_hub.__file__).parent / each).read_text()
    for each in ("constants.py", "utils/_auth.py")
)
OF_OTHERS = {"HOME", "XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR"}


def environment(container: Object) -> dict[str, str]:
    """The variables of a container, as a kubelet would set them."""
    found: dict[str, str] = {}
    for each in container.get("env", []):
        source = each.get("valueFrom", {})
        if "secretKeyRef" in source:
            found[each["name"]] = SECRETS[each["name"]]
        elif "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            found[each["name"]] = FIELDS[_AS_IN_DEPLOYMENTS.get(path, path)]
        elif "resourceFieldRef" in source:
            assert source["resourceFieldRef"]["containerName"] == container["name"]
            found[each["name"]] = "2"
        else:
            value = each["value"]
            for name in list(found):
                value = value.replace(f"$({name})", found[name])
            assert "$(" not in value, "a variable is used before it is set"
            found[each["name"]] = value
    return found


def settings_of(container: Object) -> Any:
    """The settings of the container's process. Raises ConfigError."""
    program, command = container["command"]
    assert program == "baton"
    return load_settings(
        COMMANDS[command].load_settings_class(),
        container["args"],
        prog=command,
        description="",
        section=command,
        known=settings_classes(),
        environ=environment(container),
    )


@pytest.mark.parametrize("release", RELEASES, ids=lambda each: each.name)
def test_processes_accept_what_their_pods_give_them(release: Release) -> None:
    known = {spec.env_name for cls in settings_classes() for spec in specs_of(cls).values()}
    extra = {each["name"] for each in PROCESS_EXTRAS["env"]}
    for _, pod in pod_templates(objects(release.values)):
        for container in pod["spec"]["containers"]:
            settings_of(container)
            for name in environment(container).keys() - extra:
                if name.startswith("BATON_"):
                    assert name in known
                elif name.startswith("HF_"):
                    assert re.search(rf"\b{name}\b", HUB_NAMES)
                else:
                    assert name in OF_OTHERS


def process(values: dict[str, Any], component: str) -> Any:
    """The settings of one of a release's processes."""
    for name, pod in pod_templates(objects(values)):
        if name.endswith(f"-{component}"):
            (container,) = pod["spec"]["containers"]
            return settings_of(container)
    raise AssertionError(f"no {component}")


def test_values_reach_the_processes_as_they_are() -> None:
    values = gpu(
        cluster="blue",
        model=MODEL | {"revision": "v1"},
        requestTimeoutSeconds=900,
        router={"settings": {"max_body_bytes": 33554432, "cors_origins": ["https://a", "*"]}},
        workers={
            "device": "cuda",
            "rdma": {"resource": "rdma/a"},
            "settings": {
                "memory_fraction": 0.85,
                "num_blocks": 2000000,
                "kv_checksum": True,
                "cuda_graphs": False,
                "cores": ["0-3", "8"],
            },
        },
        pools={
            "prefill": {"role": "prefill", "settings": {"num_blocks": 7}},
            "decode": {"role": "decode"},
        },
    )
    router, prefill, decode = (process(values, each) for each in ("router", "prefill", "decode"))
    assert (router.model, decode.model) == ("Qwen/Qwen3-8B",) * 2
    assert (router.revision, decode.revision) == ("v1", "v1")
    assert (router.cluster, decode.cluster) == ("blue",) * 2
    assert (router.max_body_bytes, router.cors_origins) == (33554432, ("https://a", "*"))
    assert (prefill.num_blocks, decode.num_blocks) == (7, 2000000)
    assert (decode.memory_fraction, decode.kv_checksum, decode.cuda_graphs) == (0.85, True, False)
    assert decode.cores == ("0-3", "8")
    assert (decode.kv_interface, decode.allow_kv_over_tcp) == (("mlx5_0:1",), False)
    given = (decode.worker_id, decode.pod_uid, decode.advertise_address)
    assert (*given, decode.deployment_revision) == tuple(FIELDS.values())
    assert decode.pod_name == FIELDS["metadata.name"]
    assert (router.request_timeout_s, decode.request_deadline_s) == (900, 900)
    assert (decode.device, decode.torch_threads) == ("cuda", None)


def test_tcp_is_allowed_only_where_it_is_asked_for() -> None:
    tcp, alone = process({}, "decode"), process({"pools": {"d": {"role": "decode"}}}, "d")
    assert (tcp.allow_kv_over_tcp, tcp.kv_interface, tcp.kv_ports) == (
        True,
        ("eth0",),
        "41000-41099",
    )
    assert alone.allow_kv_over_tcp


def test_a_worker_of_its_own_keeps_ucx_on_loopback() -> None:
    (release,) = [each for each in RELEASES if each.name == "one-worker"]
    decode = process(release.values, "decode")
    assert (decode.kv_interface, decode.allow_kv_over_tcp) == (("lo",), False)


def test_the_demo_model_lies_where_the_image_has_it() -> None:
    path = process({}, "decode").model
    assert path == "/opt/baton/demo_model"
    for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
        assert path in (ROOT / "deploy/docker" / name).read_text()
