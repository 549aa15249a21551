"""A fleet whose pools hold two prompts, and whose tiers hold them all, gives the tokens of a worker
without tiers, also split in two and after a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.fleet import Fleet
from kv_transfer.tiers.kv_tiers import SCAN_S
from tests.effort import some
from tests.integration.fleets import (
    all_counters,
    assert_as_expected,
    complete,
    complete_all,
    running_fleet,
    trace_of,
    wait_for,
)
from tests.integration.reference import BLOCK, NUM_TOKENS, Reference

POOL = 64  # blocks
BLOCK_BYTES = 16 << 10
ENOUGH = 50 * BLOCK_BYTES
SHARED = 15  # blocks
NUM_EVICTED = 3
"""Of the prompts that came first, and that the pools have no room for any more."""
SECRET = "the secret of a fleet that is started twice"


@pytest.fixture(scope="module")
def long(references: list[Reference]) -> list[Reference]:
    """Three times as many as fit into a pool."""
    chosen = [each for each in references if 255 <= len(each.prompt) <= 700]
    assert sum(len(each.prompt) for each in chosen) > 3 * POOL * BLOCK
    return chosen


@contextmanager
def fleet_with(
    prefill: int, host_blocks: int, folder: Path | None = None, decode: int = 1, **split: int
) -> Iterator[Fleet]:
    environment = {"BATON_HOST_TIER_BYTES": str(host_blocks * BLOCK_BYTES)}
    if folder is not None:
        environment |= {
            "BATON_DISK_TIER_DIR": str(folder),
            "BATON_DISK_TIER_BYTES": str(2000 * (BLOCK_BYTES + 4096)),
        }
    sizes = {"prefill": prefill, "decode": decode, "num_blocks": POOL}
    with running_fleet(environment, cluster_secret=SECRET, **sizes, **split) as fleet:
        yield fleet


def total(fleet: Fleet, name: str) -> int:
    """A counter of all workers."""
    return sum(each[name] for each in all_counters(fleet).values())


def grown(fleet: Fleet, long: list[Reference], name: str) -> int:
    """How much a counter of all workers grows while the prompts are answered, correctly."""
    before = total(fleet, name)
    assert_as_expected(long, complete_all(fleet, long, NUM_TOKENS, at_once=2))
    return total(fleet, name) - before


@pytest.mark.nightly
@pytest.mark.parametrize("prefill", [1, 0])
def test_blocks_come_back_from_host_memory(long: list[Reference], prefill: int) -> None:
    with fleet_with(prefill, host_blocks=2000) as fleet:
        assert grown(fleet, long, "loaded_tokens") == 0
        lengths = sum(len(each.prompt) for each in long)
        assert grown(fleet, long, "loaded_tokens") > lengths / 4
        assert grown(fleet, long, "prefill_tokens") < lengths / 2
        assert total(fleet, "host_tier_failures") == 0


@pytest.mark.parametrize(
    ("prefill", "former", "later"), some([(1, 1, 1), (0, 1, 1), (0, 2, 2), (1, 2, 1), (0, 1, 2)], 1)
)
def test_blocks_come_back_from_disk_also_after_a_restart(
    long: list[Reference], prefill: int, former: int, later: int, tmp_path: Path
) -> None:
    """Also if the decode worker has another number of ranks then."""
    layouts = [
        {"decode_tensor_parallel": each, "decode_pipeline_parallel": each, "kv_order": "pairs"}
        for each in (former, later)
    ]
    with fleet_with(prefill, host_blocks=2 * POOL, folder=tmp_path, **layouts[0]) as fleet:
        shared = grown(fleet, long, "loaded_tokens")  # beginnings that several prompts share
        wait_for("blocks on disk", lambda: total(fleet, "disk_tier_stored_bytes") > ENOUGH)
        assert grown(fleet, long, "loaded_tokens") > shared
        wait_for("blocks read from disk", lambda: total(fleet, "disk_tier_loaded_bytes"))
    with fleet_with(prefill, host_blocks=2 * POOL, folder=tmp_path, **layouts[1]) as fleet:
        assert grown(fleet, long, "disk_tier_loaded_bytes") > 0
        assert total(fleet, "disk_tier_failures") == 0


def test_a_prompt_goes_to_the_worker_whose_tier_holds_its_beginning(long: list[Reference]) -> None:
    """It continues no prompt, so no session draws it there."""
    with fleet_with(prefill=0, host_blocks=2000, decode=2) as fleet:
        homes = []
        for each in long:
            answer = complete(fleet, list(each.prompt), max_tokens=2)
            homes.append(home_of(trace_of(fleet, answer["id"])))
        assert set(homes) == {"decode-1", "decode-2"}
        stored = [0]

        def is_settled() -> bool:
            time.sleep(2 * SCAN_S)
            stored.append(total(fleet, "host_tier_stored_bytes"))
            return stored[-1] == stored[-2] > 0

        wait_for("all cold blocks in host memory, as routers were told", is_settled)
        loaded = 0
        for each, home in list(zip(long, homes, strict=True))[:NUM_EVICTED]:
            answer = complete(fleet, [*each.prompt[: SHARED * BLOCK], 7, 8, 9], max_tokens=2)
            trace = trace_of(fleet, answer["id"])
            assert home_of(trace) == home
            found = {part["source"]: part["num_tokens"] for part in trace["prompt_sources"]}
            loaded += found.get("host memory", 0)
            kept = found.get("host memory", 0) + found.get("own cache", 0)
            assert kept >= (SHARED - 1) * BLOCK  # one block may be computed: it takes as long
        assert loaded > 0


def home_of(trace: dict[str, Any]) -> str:
    worker: str = trace["attempts"][-1]["decode"]["worker_id"]
    return worker
