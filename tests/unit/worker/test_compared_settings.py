"""Every setting of a worker either is compared between workers, or may differ without harm."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from decode_worker.settings import DecodeSettings
from engine.engine_config import EngineConfig
from engine.loader import load_engine
from prefill_worker.settings import PrefillSettings
from process.sockets.hello import HelloPolicy
from protocol.errors import ConfigError
from protocol.messages import PROTOCOL_VERSION, Hello, HelloRefused, Role
from scheduling.scheduler import SchedulerConfig
from tests.paths import DEMO_MODEL

IN_FINGERPRINTS = {
    "model": {"folder": "another"},
    "dtype": {"dtype": "float32"},
    "weights": {"weights": "int8"},
    "activations": {"activations": "int8"},
    "kv_dtype": {"kv_dtype": "fp8"},
    "kv_order": {"kv_order": "tokens"},
    "block_size": {"scheduler": SchedulerConfig(block_size=32, chunk_min_tokens=32)},
}
"""A difference changes a fingerprint that Hello and the registration carry: neither workers nor
routers use one another."""
REFUSED_OTHERWISE = {
    "batch_invariant": "a card's kernels are named in the fingerprint, see test_invariant_backend; "
    "on a CPU the setting changes nothing",
    "kv_windows": "groups of layers are in the fingerprint, see test_hello; where no layer has a "
    "window, the setting changes nothing",
    "transport": "a worker refuses a pool for another transport, see `TransferPeers.add`",
    "cluster_secret": "the CURVE handshake fails, and block hashes differ",
    "revision": "other weights have another fingerprint; the same ones may have two revisions",
    "redis_url": "they do not meet",
    "redis_ca_file": "as redis_url",
    "redis_cert_file": "as redis_url",
    "redis_key_file": "as redis_url",
    "cluster": "they do not meet",
    "worker_id": "two workers never have the same one",
}
MAY_DIFFER = {
    # what computes, and how fast: the results are the same within the dtype's rounding
    "attention", "cores", "cuda_graphs", "device", "kernels_dir", "one_step_ahead", "sm_fraction",
    "torch_threads",
    # a descriptor names the ranks, whose layers and heads are copied to their places
    "peer_pipeline_parallel", "peer_tensor_parallel", "pipeline_parallel", "tensor_parallel",
    # where ranks run and how they add up: as good as one rank within rounding
    "card_sums", "join_s", "master_addr", "master_port", "nnodes", "node_rank",
    # a peer's weights have the fingerprint of its checkpoint
    "weights_from",
    # what a worker keeps of its own blocks: files carry the layout's fingerprint
    "disk_tier_bytes", "disk_tier_dir", "host_tier_bytes", "tier_max_age_s",
    # each worker's limits: placement knows them, or they shape its own schedule only
    "chunk_max_tokens", "chunk_min_tokens", "itl_target_ms", "max_batch_size", "max_context",
    "mask_limit_s", "mask_wait_ms", "memory_fraction", "num_blocks", "prompt_chunk_tokens",
    "request_deadline_s",
    # times: a grant carries its own, and each side keeps its own promises
    "drain_grace_s", "grant_margin_ms", "grant_ttl_ms", "landing_ms", "lease_s",
    "peer_silence_s", "resume_grace_s", "stall_alarm_s", "stats_idle_ms", "stats_interval_ms",
    # the decode worker's descriptor says whether it wants digests
    "kv_checksum",
    # addresses, logs, names for people
    "advertise_address", "allow_kv_over_tcp", "control_port", "events_port", "host",
    "deployment_revision", "kv_interface", "kv_ports", "log_format", "log_level", "metrics_host",
    "metrics_port", "parent_pid", "pod_conditions", "pod_name", "pod_uid", "probe_port",
    "served_model_name",
    # readiness, for orchestrators
    "require_prefill",
}  # fmt: skip


def test_every_setting_is_compared_or_may_differ() -> None:
    known = {*IN_FINGERPRINTS, *REFUSED_OTHERWISE, *MAY_DIFFER}
    settings = {each.name for kind in (PrefillSettings, DecodeSettings) for each in fields(kind)}
    assert settings - known == set(), "is a new setting compared, or may it differ?"
    assert known - settings == set(), "these settings are gone"
    assert len(known) == len(IN_FINGERPRINTS) + len(REFUSED_OTHERWISE) + len(MAY_DIFFER)


CONFIG = EngineConfig(
    DEMO_MODEL, SchedulerConfig(block_size=16), dtype="bfloat16", device="cpu", num_blocks=2
)


def policy_of(config: EngineConfig) -> HelloPolicy:
    layout = load_engine(config, lambda: 0.0).engine.layout
    return HelloPolicy("worker", "incarnation", layout.model_fingerprint, layout.fingerprint)


@pytest.fixture(scope="module")
def ours() -> HelloPolicy:
    return policy_of(CONFIG)


@pytest.mark.parametrize("name", IN_FINGERPRINTS)
def test_a_difference_is_refused_with_both_values(
    ours: HelloPolicy, name: str, tmp_path: Path
) -> None:
    change = dict(IN_FINGERPRINTS[name])
    if "folder" in change:
        change["folder"] = altered_copy(tmp_path)
    try:
        theirs = policy_of(replace(CONFIG, **change))  # type: ignore[arg-type]
    except ConfigError as error:
        pytest.skip(f"not on this CPU: {error}")
    if theirs == ours:
        pytest.skip("this CPU has one order of blocks only, or no fast integers")
    hello = Hello(
        sender="peer",
        role=Role.DECODE,
        protocol_version=PROTOCOL_VERSION,
        model_fingerprint=theirs.model_fingerprint,
        layout_fingerprint=theirs.layout_fingerprint,
    )
    refused = ours.answer(hello)
    assert isinstance(refused, HelloRefused)
    assert refused.ours != refused.theirs
    assert {refused.ours, refused.theirs} < {
        ours.model_fingerprint,
        ours.layout_fingerprint,
        theirs.model_fingerprint,
        theirs.layout_fingerprint,
    }


def test_under_fp8_kv_the_computing_type_is_compared_too() -> None:
    """The layout says fp8 for both."""
    try:
        fp8, other = (
            policy_of(replace(CONFIG, kv_dtype="fp8", dtype=dtype))
            for dtype in ("bfloat16", "float32")
        )
    except ConfigError as error:
        pytest.skip(f"not on this CPU: {error}")
    assert fp8.model_fingerprint != other.model_fingerprint


def altered_copy(folder: Path) -> Path:
    """The demo model with one bit of one weight changed."""
    for each in DEMO_MODEL.iterdir():
        if each.is_file():
            (folder / each.name).write_bytes(each.read_bytes())
    (weights, *_) = sorted(folder.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return folder
