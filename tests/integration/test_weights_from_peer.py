"""A worker whose weights come from another: it has no file of them, and answers as the other does.
What goes wrong with the other costs a line in the log."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.texts_fingerprint import texts_fingerprint
from cli.child import Child
from cli.child_settings import Secrets
from cli.up_settings import UpSettings
from engine.checkpoint.config import load_model_config
from engine.checkpoint.files import model_fingerprint
from engine.checkpoint.model_weights import Weights
from engine.checkpoint.stored_tensors import OpenTensors
from engine.checkpoint.weights import load_weights
from kv_transfer.transports.interface import Transport
from kv_transfer.transports.registry import create_transport
from process.process_watch import machine_name
from process.store.embedded_valkey import EmbeddedValkey
from process.store.fleet_watcher import read_fleet
from process.store.worker_lease import WorkerLease
from protocol.errors import TransferError
from protocol.messages import Role
from protocol.registration import WorkerInfo, WorkerState
from tests.forked import ForkedChildren, fork_context
from tests.integration.fleets import (
    SETTINGS,
    all_counters,
    assert_as_expected,
    complete_all,
    running_fleet,
    wait_for,
    workers,
)
from tests.integration.reference import DEMO_MODEL, NUM_TOKENS, Reference
from tests.registration import registration
from tests.weights_sender import PATIENCE_S, SECRET, means, sending
from worker.weights.choice import Wanted, peers_with, try_load_from_peer
from worker.weights.peer_tensors import Asker

WAIT_S, LEASE_S = 300.0, 60.0
WITHOUT_WEIGHTS = shutil.ignore_patterns("*.safetensors")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """The demo model without its weights."""
    folder = tmp_path / DEMO_MODEL.name
    shutil.copytree(DEMO_MODEL, folder, ignore=WITHOUT_WEIGHTS)
    return folder


def late_worker(
    settings: UpSettings, role: Role, redis_url: str, log_dir: Path, **variables: str
) -> Child:
    """A worker that takes its weights from a peer, not started yet."""
    environ = {**os.environ, "BATON_WEIGHTS_FROM": "peer", **variables}
    children = ForkedChildren(settings, frozenset(SETTINGS) | {"transport"}, environ)
    return children.worker(role, f"{role.value}-late", Secrets(redis_url, SECRET, ""), log_dir)


@contextmanager
def started(child: Child) -> Iterator[Child]:
    child.start()
    try:
        yield child
    finally:
        child.signal(signal.SIGTERM)
        assert child.wait(WAIT_S), child.log_tail(40)
    assert child.exit_status() == 0


def test_a_worker_without_weights_computes_as_its_peer(
    texts: Path, tmp_path: Path, references: list[Reference]
) -> None:
    apart = {"local_prefill_threshold_tokens": 0, "transport": "nixl"}
    with running_fleet(prefill=0, cluster_secret=SECRET, **apart) as fleet:
        settings = replace(fleet.settings, model=str(texts))
        child = late_worker(settings, Role.PREFILL, fleet.redis_url, tmp_path)
        with started(child) as late:
            wait_for(
                "the newcomer",
                lambda: late.name in workers(fleet) or not late.is_running(),
                WAIT_S,
            )
            assert late.is_running(), late.log_tail(40)
            assert "weights from peer decode-1, 4 MB in " in late.log_path.read_text()
            for first in range(0, len(references), 6):
                some = references[first : first + 6]
                assert_as_expected(some, complete_all(fleet, some, NUM_TOKENS, 3))
                counters = all_counters(fleet)
                if counters["decode-1"]["handoffs"]:  # not before its first report has come
                    break
            assert counters["decode-1"]["handoffs"]
            assert counters[late.name]["prefill_tokens"]


def dying(transport: str) -> Transport:
    """A transport that kills its process before it writes a second time."""
    real, num_writes = create_transport(transport, "cpu"), 0
    post_write = real.post_write

    def post(*arguments: Any) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return post_write(*arguments)

    real.post_write = post  # type: ignore[method-assign]
    return real


def send_until_death(transport: str, told: Connection) -> None:
    """The life of a process whose weights will not arrive."""
    with sending(DEMO_MODEL, replace(means(transport), open=lambda: dying(transport))) as sender:
        told.send((sender.server.endpoint, os.getpid()))
        threading.Event().wait()


@contextmanager
def dying_sender(transport: str) -> Iterator[WorkerInfo]:
    """Its registration; it has been killed at the end."""
    context = fork_context()
    told, tell = context.Pipe(duplex=False)
    process = context.Process(target=send_until_death, args=(transport, tell), daemon=True)
    process.start()
    try:
        endpoint, pid = told.recv()
        here = {"role": Role.PREFILL, "machine": machine_name(), "pid": pid}
        yield sender_info("prefill-1", endpoint, transport, **here)
        process.join(WAIT_S)
        assert process.exitcode == -signal.SIGKILL
    finally:
        process.kill()
        process.join()


def sender_info(worker_id: str, control: str, transport: str, **changes: Any) -> WorkerInfo:
    fields = {
        "model": DEMO_MODEL.name,
        "model_fingerprint": model_fingerprint(DEMO_MODEL),
        "texts_fingerprint": texts_fingerprint(DEMO_MODEL),
        "sends_weights": True,
    }
    return registration(worker_id, control=control, transport=transport, **fields | changes)


@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_the_next_peer_is_asked_when_one_is_killed_in_mid_transfer(
    valkey: EmbeddedValkey,
    cluster: str,
    leases: Callable[..., WorkerLease],
    texts: Path,
    transport: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    config = load_model_config(texts)

    def load(open_tensors: OpenTensors) -> Weights:
        return load_weights(open_tensors(), config)

    wanted = Wanted(valkey.url, cluster, DEMO_MODEL.name, texts)
    asker, by = Asker("decode-9", Role.DECODE, SECRET), means(transport)
    with (
        ExitStack() as stack,
        dying_sender(transport) as first,
        sending(DEMO_MODEL, means(transport)) as healthy,
    ):
        second = sender_info("decode-1", healthy.server.endpoint, transport)
        assert all(leases(info, LEASE_S).wait_registered(WAIT_S) for info in (first, second))
        loaded = try_load_from_peer(wanted, asker, by, load, stack)
    assert loaded is not None
    assert torch.equal(loaded.final_norm, load_weights(DEMO_MODEL, config).final_norm)
    assert "weights from peer decode-1, 4 MB in " in caplog.text
    assert "not from a peer" not in caplog.text


def test_a_worker_loads_its_checkpoint_when_its_peer_is_killed_in_mid_transfer(
    valkey: EmbeddedValkey, cluster: str, leases: Callable[..., WorkerLease], tmp_path: Path
) -> None:
    settings = UpSettings(**SETTINGS | {"transport": "shm"})
    variables = {"BATON_CLUSTER": cluster, "BATON_PEER_SILENCE_S": str(PATIENCE_S)}
    child = late_worker(settings, Role.DECODE, valkey.url, tmp_path, **variables)
    with dying_sender("shm") as info:
        assert leases(info, LEASE_S).wait_registered(WAIT_S)
        with started(child) as late:
            wait_for(
                "the worker",
                lambda: late.name in read_fleet(valkey.url, cluster) or not late.is_running(),
                WAIT_S,
            )
            assert late.is_running(), late.log_tail(40)
    lines = late.log_path.read_text().splitlines()
    said = [line for line in lines if "not from a peer" in line]
    reason = "the weights come from the checkpoint, not from a peer: prefill-1: its process has"
    assert len(said) == 1
    assert reason in said[0]


REASONS: list[tuple[dict[str, Any], str]] = [
    ({"state": WorkerState.DRAINING}, "a is draining"),
    ({"protocol_version": 1}, "a speaks version 1 of the protocol, not"),
    ({"model": "other"}, f"a serves other, not {DEMO_MODEL.name}"),
    ({"texts_fingerprint": "0"}, "a has another configuration or tokenizer"),
    ({"model_fingerprint": "0"}, "a has other weights than our checkpoint"),
    ({"sends_weights": False}, "a has no files of weights to send"),
    ({"transport": "nixl"}, "a moves bytes by nixl, not by shm"),
]


@pytest.mark.parametrize(("changes", "reason"), REASONS, ids=[each for _, each in REASONS])
def test_the_log_says_why_no_peer_is_asked(
    valkey: EmbeddedValkey,
    cluster: str,
    leases: Callable[..., WorkerLease],
    changes: dict[str, Any],
    reason: str,
) -> None:
    info = sender_info("a", "tcp://127.0.0.1:1", **{"transport": "shm"} | changes)
    assert leases(info, LEASE_S).wait_registered(WAIT_S)
    wanted = Wanted(valkey.url, cluster, DEMO_MODEL.name, DEMO_MODEL)
    with pytest.raises(TransferError, match=f"^{re.escape(reason)}"):
        peers_with(wanted, "b", "shm")
    with pytest.raises(TransferError, match=r"^no other worker is registered$"):
        peers_with(wanted, "a", "shm")
