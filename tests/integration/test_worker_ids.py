"""Two workers with one id: who keeps it, who is refused, and when a restarted one has it back."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from cli.child_settings import Secrets
from process.process_watch import machine_name
from process.store.embedded_valkey import EmbeddedValkey
from process.store.fleet_watcher import read_fleet
from process.store.registry import Registry
from process.store.worker_lease import WorkerLease
from protocol import wire
from protocol.messages import Role
from protocol.registration import WorkerState
from tests.forked import ForkedChildren
from tests.http_client import HTTP
from tests.integration.fleets import complete, running_fleet, wait_for, workers
from tests.integration.lease_holder import LONG_S, lease_holder, renewed
from tests.integration.reference import NUM_TOKENS, Reference
from tests.registration import registration

SECRET = "the secret of a test's cluster"
STILL_LEASE_S = 3.0
"""Of a worker that stands still until its lease has ended."""
LONG_MS = 600_000
WAIT_S = 60.0
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="machines have names on Linux alone")


def refused(newcomer: WorkerLease, *holders: WorkerLease) -> str:
    """Why a newcomer is refused, once it has seen a holder renew its lease."""
    return wait_for("the refusal", lambda: renewed(*holders) and newcomer.refusal, WAIT_S)


def test_newcomers_are_refused_while_the_holders_live(
    valkey: EmbeddedValkey, cluster: str, leases: Callable[..., WorkerLease]
) -> None:
    infos = {
        name: registration(name, machine="elsewhere", pid=11, host="gpu-7", state=state)
        for name, state in (("a", WorkerState.READY), ("b", WorkerState.DRAINING))
    }
    holders = [leases(info) for info in infos.values()]
    assert all(holder.wait_registered(WAIT_S) for holder in holders)
    newcomers = [leases(registration(name, "life-2"), grace_s=0.1) for name in infos]
    for name, newcomer in zip(infos, newcomers, strict=True):
        assert refused(newcomer, *holders) == (
            f"worker_id {name} is held by the decode worker at tcp://127.0.0.1:1 (pid 11 on gpu-7)"
            ", which is alive; stop that worker, or give this one another worker_id"
        )
        newcomer.close()
    assert read_fleet(valkey.url, cluster) == infos
    assert [(holder.refusal, holder.lapses) for holder in holders] == [(None, 0)] * 2


def test_a_dead_holder_elsewhere_keeps_its_id_until_its_lease_ends(
    valkey: EmbeddedValkey,
    cluster: str,
    leases: Callable[..., WorkerLease],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    registry = Registry(cluster)
    info = registration("a", machine="elsewhere", pid=2**22 + 1)  # a pid that nobody has
    with redis.Redis.from_url(valkey.url) as client:
        client.eval(*registry.claim(info, LONG_MS / 1e3))
        newcomer = leases(registration("a", "life-2", machine=machine_name()), grace_s=0.1)
        wait_for("it to wait", lambda: "a: waiting for the lease of the decode" in caplog.text)
        assert not newcomer.wait_registered(0.3)
        assert read_fleet(valkey.url, cluster) == {"a": info}
        client.pexpire(registry.worker_key("a"), 1)
    assert newcomer.wait_registered(WAIT_S)
    assert newcomer.refusal is None


@on_linux
def test_a_process_of_this_host_keeps_its_id_while_it_lives_and_not_longer(
    valkey: EmbeddedValkey,
    cluster: str,
    leases: Callable[..., WorkerLease],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with (
        lease_holder(valkey.url, cluster, "a", "life-1", LONG_S) as holder,
        redis.Redis.from_url(valkey.url) as client,
    ):
        here = machine_name()
        assert str(holder.pid) in refused(leases(registration("a", "x", machine=here), grace_s=0.1))
        assert read_fleet(valkey.url, cluster)["a"].incarnation == "life-1"
        holder.send_signal(signal.SIGSTOP)
        assert client.pexpire(Registry(cluster).worker_key("a"), LONG_MS)
        caplog.clear()
        newcomer = leases(registration("a", "life-2", machine=here), grace_s=0.1)
        wait_for("it to wait", lambda: "a: waiting for the lease of the decode" in caplog.text)
        assert not newcomer.wait_registered(0.2), "a stopped process may go on"
        assert newcomer.refusal is None
        holder.kill()
        assert newcomer.wait_registered(WAIT_S), "long before the lease ends"
        assert newcomer.refusal is None


def test_of_two_newcomers_one_replaces_the_holder(valkey: EmbeddedValkey, cluster: str) -> None:
    registry = Registry(cluster)
    holder, first, second = (registration("a", f"life-{number}") for number in (1, 2, 3))
    with redis.Redis.from_url(valkey.url) as client:
        assert client.eval(*registry.claim(holder, LONG_MS / 1e3)) == [None, 1, 0]
        former, is_ours, _ = client.eval(*registry.claim(first, LONG_MS / 1e3, replaces="life-1"))
        assert (former, is_ours) == (wire.encode_worker_info(holder), 1)
        former, is_ours, left_ms = client.eval(*registry.claim(second, 1.0, replaces="life-1"))
        assert (former, is_ours) == (wire.encode_worker_info(first), 0)
        assert LONG_MS / 2 < left_ms <= LONG_MS
        former, is_ours, _ = client.eval(*registry.renew(holder, 1.0))
        assert (former, is_ours) == (wire.encode_worker_info(first), 0)
    assert read_fleet(valkey.url, cluster) == {"a": first}


def test_what_is_no_registration_holds_no_id(
    valkey: EmbeddedValkey, cluster: str, leases: Callable[..., WorkerLease]
) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        for number, value in enumerate((b"\xffnot json", b"3", b"{}")):
            client.set(Registry(cluster).worker_key(f"w{number}"), value)
            assert leases(registration(f"w{number}")).wait_registered(WAIT_S)


# -- those that had an id and lost it ----------------------------------------------------------


@on_linux
def test_a_worker_that_stood_still_until_its_id_was_taken_ends(
    valkey: EmbeddedValkey, cluster: str, leases: Callable[..., WorkerLease]
) -> None:
    with lease_holder(valkey.url, cluster, "a", "life-1", STILL_LEASE_S) as former:
        former.send_signal(signal.SIGSTOP)
        wait_for("its lease to end", lambda: not read_fleet(valkey.url, cluster), WAIT_S)
        with redis.Redis.from_url(valkey.url) as client:
            client.delete(f"baton:{cluster}:epoch")  # as if the store had forgotten it, too
        info = registration("a", "life-2", machine=machine_name(), pid=os.getpid(), host="gpu-8")
        newcomer = leases(info)
        assert newcomer.wait_registered(WAIT_S)
        former.send_signal(signal.SIGCONT)
        told, _ = former.communicate(timeout=WAIT_S)
        assert f"worker_id a is held by the decode worker at {info.control} (pid {info.pid}" in told
        assert former.returncode == 2
    assert read_fleet(valkey.url, cluster) == {"a": info}
    assert newcomer.refusal is None


def test_a_worker_that_stood_still_while_it_asked_takes_no_id_back(
    valkey: EmbeddedValkey, cluster: str, leases: Callable[..., WorkerLease]
) -> None:
    """It may be stopped between its look at the clock and the store's look at its id."""
    former = leases(registration("a"), lease_s=STILL_LEASE_S, grace_s=0.1)
    assert former.wait_registered(WAIT_S)
    asks, goes_on = threading.Event(), threading.Event()
    pipeline_of = former._client.pipeline

    def stopped_once(**options: Any) -> Any:
        pipeline = pipeline_of(**options)
        if not asks.is_set():
            asks.set()
            assert goes_on.wait(WAIT_S)
        return pipeline

    former._client.pipeline = stopped_once
    assert renewed(former)
    assert asks.wait(WAIT_S)
    wait_for("its lease to end", lambda: not read_fleet(valkey.url, cluster), WAIT_S)
    with redis.Redis.from_url(valkey.url) as client:
        client.delete(f"baton:{cluster}:epoch")
    newcomer = leases(registration("a", "life-2"))
    assert newcomer.wait_registered(WAIT_S)
    goes_on.set()
    assert "worker_id a is held by" in refused(former, newcomer)
    assert former.lapses == 0, "it never tried to register again"
    assert read_fleet(valkey.url, cluster) == {"a": registration("a", "life-2")}


def test_a_worker_whose_id_was_taken_after_a_lapse_is_refused(
    valkey: EmbeddedValkey, cluster: str, leases: Callable[..., WorkerLease]
) -> None:
    former = leases(registration("a"), grace_s=0.1)
    assert former.wait_registered(WAIT_S)
    with redis.Redis.from_url(valkey.url) as client:
        client.delete(Registry(cluster).worker_key("a"))
    wait_for("the lapse", lambda: renewed(former) and former.has_lapsed)
    newcomer = leases(registration("a", "life-2"))
    assert newcomer.wait_registered(WAIT_S)
    former.register_again("life-3")
    assert "worker_id a is held by" in refused(former, newcomer)
    assert read_fleet(valkey.url, cluster) == {"a": registration("a", "life-2")}
    assert newcomer.refusal is None


def test_a_newcomer_that_comes_when_the_store_has_forgotten_everybody_yields(
    valkey: EmbeddedValkey, cluster: str, leases: Callable[..., WorkerLease]
) -> None:
    holder = leases(registration("a"))
    assert holder.wait_registered(WAIT_S)
    newcomer = registration("a", "life-2", host="gpu-8")
    with redis.Redis.from_url(valkey.url) as client, client.pipeline() as transaction:
        transaction.flushall()
        transaction.eval(*Registry(cluster).claim(newcomer, LONG_MS / 1e3))
        transaction.execute()
    holder.update(WorkerState.DRAINING)
    draining = msgspec.structs.replace(registration("a"), state=WorkerState.DRAINING)
    wait_for("it to be back", lambda: read_fleet(valkey.url, cluster) == {"a": draining})
    assert (holder.refusal, holder.lapses) == (None, 1)


def test_a_newcomer_that_waited_for_the_store_is_refused(cluster: str) -> None:
    with EmbeddedValkey() as valkey:
        holder = WorkerLease(valkey.url, cluster, registration("a"), LONG_S)
        holder.start()
        assert holder.wait_registered(WAIT_S)
        os.kill(valkey.pid, signal.SIGKILL)
        wait_for("the store to be gone", lambda: valkey.exit_status() is not None)
        newcomer = WorkerLease(valkey.url, cluster, registration("a", "life-2"), LONG_S, 0.1)
        newcomer.start()
        assert not newcomer.wait_registered(0.1)
        assert newcomer.refusal is None
        valkey.restart()
        told = refused(newcomer, holder, newcomer)
        assert "worker_id a is held by" in told, "whichever of them comes first"
        newcomer.close()
        wait_for("the holder to be back", lambda: read_fleet(valkey.url, cluster))
        assert read_fleet(valkey.url, cluster) == {"a": registration("a")}
        assert holder.refusal is None
        holder.close()


# -- real workers -------------------------------------------------------------------------------


def test_a_second_worker_ends_with_one_line_and_the_first_goes_on_serving(
    tmp_path: Path, references: list[Reference]
) -> None:
    reference = references[0]
    with running_fleet({"BATON_LEASE_S": "6"}, prefill=0, cluster_secret=SECRET) as fleet:
        before = workers(fleet)["decode-1"]
        secrets = Secrets(fleet.redis_url, SECRET, supervisor_key="")
        newcomer = ForkedChildren(fleet.settings).worker(
            Role.PREFILL, "decode-1", secrets, tmp_path
        )
        newcomer.start()
        assert newcomer.wait(60)
        assert newcomer.exit_status() == 2
        told = newcomer.log_path.read_text()
        assert told.splitlines()[-1] == (
            f"baton prefill: worker_id decode-1 is held by the decode worker at "
            f"{fleet.workers['decode-1'].control} (pid {before['pid']} on {before['host']}), which "
            "is alive; stop that worker, or give this one another worker_id"
        )
        assert "Traceback" not in told
        answer = complete(fleet, list(reference.prompt), max_tokens=NUM_TOKENS)
        assert answer["choices"][0]["token_ids"] == list(reference.output)
        after = workers(fleet)
        assert after.keys() == {"decode-1"}
        assert after["decode-1"]["pid"] == before["pid"]
        assert not after["decode-1"]["counters"].get("lapses")
        lost = "baton_router_workers_lost_total 0.0"
        assert lost in HTTP.get(f"{fleet.url}/metrics").text, "the router noticed nothing"
