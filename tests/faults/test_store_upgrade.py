"""A fleet whose store learns TLS: processes of the former release and of the new one share it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cli.fleet import Fleet
from cli.up_settings import UpSettings
from process.store.drain_requests import request_drain
from protocol.messages import Role
from tests.faults.faulty_fleet import Stream
from tests.forked import ForkedChildren
from tests.integration.fleets import (
    PATIENCE,
    PROMPT_REPORTS,
    SETTINGS,
    running_fleet,
    wait_for,
    workers,
)
from tests.integration.reference import NUM_TOKENS, Reference
from tests.tls_store import tls_store

SHARED: dict[str, Any] = {"cluster_secret": "a-secret-of-tests-of-both", "prefill": 1, "decode": 1}


def leaving_fleet(**settings: Any) -> Fleet:
    """A fleet that is not checked at its end, because its workers leave before."""
    chosen = SETTINGS | settings
    environ = {**os.environ, **PROMPT_REPORTS, **PATIENCE}
    up = UpSettings(**chosen)
    return Fleet(up, ForkedChildren(up, frozenset(chosen), environ))


def serves(fleet: Fleet, names: set[str]) -> bool:
    """Whether the fleet's router is connected to exactly these workers."""
    return {name for name, each in workers(fleet).items() if each["connected"]} == names


def own(fleet: Fleet) -> set[str]:
    return {name for name, each in fleet.processes.items() if each.role != Role.ROUTER}


@pytest.mark.nightly
def test_no_request_is_lost_while_the_last_pods_without_tls_leave(
    long_prompts: list[Reference], tmp_path: Path
) -> None:
    with (
        tls_store(tmp_path) as store,
        running_fleet(redis_url=store.url, **SHARED) as new,
        leaving_fleet(redis_url=store.plain_url, **SHARED) as former,
    ):
        every = own(former) | own(new)
        fleets = (former, new)
        wait_for("one fleet", lambda: all(serves(each, every) for each in fleets))
        running = [
            (Stream(each.url, list(one.prompt), NUM_TOKENS), one)
            for one in long_prompts[:4]
            for each in fleets
        ]
        for name in own(former):
            assert request_drain(store.url, "default", name) is not None
        wait_for(
            "the former workers to leave", lambda: all(serves(each, own(new)) for each in fleets)
        )
        running += [
            (Stream(each.url, list(one.prompt), NUM_TOKENS), one)
            for one in long_prompts[4:6]
            for each in fleets
        ]
        for stream, one in running:
            stream.wait()
            assert (stream.error, stream.tokens) == (None, list(one.output))
