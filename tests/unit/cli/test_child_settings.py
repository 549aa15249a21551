"""What reaches each process of a fleet: flags, secrets, and what the operator said elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cli import child_settings
from cli.child import Child
from cli.child_settings import ChildSettings, Secrets
from cli.commands import COMMANDS
from cli.up_settings import UpSettings
from process.cores import cores_in
from process.settings import load_settings
from protocol.messages import Role

SHARED = Secrets(
    redis_url="redis://:word@127.0.0.1:1",
    cluster_secret="a secret of sixteen",
    supervisor_key="a-key-that-opens-the-fleet",
)
DIR = Path("/logs")


def parsed(child: Child):
    """The settings that a child's process will have."""
    role = child.role.value
    flags = child._command[child._command.index(role) + 1 :]
    return load_settings(
        COMMANDS[role].load_settings_class(),
        flags,
        prog="p",
        description="d",
        section=role,
        environ=child._env,
    )


def test_settings_reach_workers_and_router() -> None:
    settings = UpSettings(
        model="/m", dtype="float32", block_size=8, local_prefill_threshold_tokens=3, port=9
    )
    children = ChildSettings(settings, environ={"PATH": "/bin", "BATON_DTYPE": "float16"})
    worker = parsed(children.worker(Role.DECODE, "decode-1", SHARED, DIR))
    assert (worker.model, worker.dtype, worker.block_size) == ("/m", "float32", 8)
    assert (worker.worker_id, worker.host, worker.parent_pid) == (
        "decode-1",
        "127.0.0.1",
        os.getpid(),
    )
    assert (worker.redis_url, worker.cluster_secret) == (SHARED.redis_url, SHARED.cluster_secret)
    router = parsed(children.router(SHARED, DIR / "port", DIR))
    assert (router.port, router.local_prefill_threshold_tokens) == (9, 3)
    assert router.port_file == "/logs/port"
    assert router.responses_store
    assert (router.cluster_secret, router.supervisor_key) == (
        SHARED.cluster_secret,
        SHARED.supervisor_key,
    )


def test_secrets_are_in_no_argument() -> None:
    children = ChildSettings(UpSettings(model="/m"))
    for child in (
        children.worker(Role.PREFILL, "p", SHARED, DIR),
        children.router(SHARED, DIR / "port", DIR),
    ):
        hidden = ("word", "sixteen", "opens")
        assert not any(each in part for part in child._command for each in hidden)
    assert not any(each in repr(SHARED) for each in hidden)


def test_only_flags_are_forwarded_and_the_rest_is_inherited(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("num_blocks = 5\nblock_size = 4\n[decode]\nnum_blocks = 7\n")
    environ = {
        "PATH": "/bin",
        "BATON_LEASE_S": "1.5",
        "BATON_DTYPE": "float16",
        "BATON_PORT": "77",
        "BATON_HOST": "0.0.0.0",
    }
    settings = UpSettings(model="/m", num_blocks=5, block_size=2, dtype="float16", port=77)
    children = ChildSettings(
        settings, frozenset({"model", "block_size"}), environ, config_path=str(file)
    )
    child = children.worker(Role.DECODE, "decode-1", SHARED, DIR)
    assert "BATON_PORT" not in child._env, "not a worker's"
    worker = parsed(child)
    assert worker.num_blocks == 7, "the worker's own table"
    assert worker.block_size == 2, "the flag"
    assert (worker.dtype, worker.lease_s) == ("float16", 1.5)
    assert worker.host == "127.0.0.1", "where HTTP is served is not where workers listen"
    router = children.router(SHARED, DIR / "port", DIR)
    assert "--port=77" in router._command


@pytest.mark.parametrize(
    ("settings", "fraction"),
    [
        ({"prefill": 1, "decode": 1}, 0.3),
        ({"prefill": 2, "decode": 4}, 0.1),
        ({"prefill": 2, "decode": 4, "num_blocks": 9}, None),
        ({"prefill": 2, "decode": 4, "device": "cuda"}, None),
        ({"prefill": 2, "decode": 4, "memory_fraction": 0.2}, 0.2),
    ],
)
def test_workers_on_a_cpu_share_its_memory(settings: dict, fraction: float | None) -> None:
    up = UpSettings(model="/m", **({"device": "cpu"} | settings))
    child = ChildSettings(up, environ={}).worker(Role.DECODE, "d", SHARED, DIR)
    assert parsed(child).memory_fraction == fraction


@pytest.fixture
def six_cores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    cores = [2, 3, 4, 5, 8, 9]
    monkeypatch.setattr(child_settings, "usable_cores", lambda: list(cores))
    monkeypatch.setattr(child_settings, "by_neighbourhood", list)
    monkeypatch.setattr(child_settings, "threads_within_quota", lambda num_cores: num_cores)
    return cores


@pytest.mark.parametrize(
    ("settings", "threads", "shares"),
    [
        ({}, 3, [[2, 3, 4], [5, 8, 9]]),
        ({"torch_threads": 2}, 2, [[2, 3, 4], [5, 8, 9]]),
        ({"torch_threads": 4}, 4, []),
        ({"prefill": 2, "decode": 2}, 1, [[2], [3], [4], [5]]),
        ({"prefill": 0}, 6, []),
        ({"decode": 1000}, 1, []),
        ({"pin": False}, 3, []),
        ({"device": "cuda:0"}, 3, []),
    ],
)
def test_cores_are_shared(
    six_cores: list[int], settings: dict, threads: int, shares: list[list[int]]
) -> None:
    children = ChildSettings(UpSettings(model="/m", **({"device": "cpu"} | settings)), environ={})
    assert children.torch_threads == threads
    assert children.core_shares == shares


def test_workers_share_the_threads_of_a_container_s_cpu_quota(
    six_cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_settings, "threads_within_quota", lambda num_cores: num_cores - 2)
    children = ChildSettings(UpSettings(model="/m", device="cpu"), environ={})
    assert children.torch_threads == 2
    assert children.core_shares == [[2, 3, 4], [5, 8, 9]]


def test_a_worker_is_told_its_cores() -> None:
    children = ChildSettings(UpSettings(model="/m"), environ={})
    child = children.worker(Role.DECODE, "d", SHARED, DIR, [8, 2, 3])
    assert cores_in(parsed(child).cores) == [2, 3, 8]
    assert parsed(children.worker(Role.DECODE, "d", SHARED, DIR)).cores == ()


def test_workers_are_told_the_ranks_of_the_other_role() -> None:
    ranks = {"prefill_pipeline_parallel": 3, "decode_tensor_parallel": 4, "transport": "nixl"}
    children = ChildSettings(UpSettings(model="/m", **ranks), environ={})
    prefill, decode = (
        parsed(children.worker(role, "w", SHARED, DIR)) for role in (Role.PREFILL, Role.DECODE)
    )
    assert (prefill.peer_tensor_parallel, prefill.peer_pipeline_parallel) == (4, 1)
    assert (decode.peer_tensor_parallel, decode.peer_pipeline_parallel) == (1, 3)
    over_memory = ChildSettings(UpSettings(model="/m", **ranks | {"transport": "shm"}), environ={})
    told = parsed(over_memory.worker(Role.DECODE, "w", SHARED, DIR))
    assert (told.peer_tensor_parallel, told.peer_pipeline_parallel) == (None, None)


def test_workers_of_any_number_of_ranks_get_one_layout() -> None:
    def layout(**fields: Any) -> tuple[str, str]:
        children = ChildSettings(UpSettings(model="/m", **fields), environ={})
        worker = parsed(children.worker(Role.DECODE, "decode-1", SHARED, DIR))
        return worker.kv_order, worker.kv_windows

    assert layout(kv_windows="auto") == ("auto", "auto")
    assert layout(kv_windows="auto", prefill_tensor_parallel=2) == ("pairs", "auto")
    own = {"kv_order": "tokens", "kv_windows": "window"}
    assert layout(prefill_pipeline_parallel=2, **own) == ("tokens", "window")
