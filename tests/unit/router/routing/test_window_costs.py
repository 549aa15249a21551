"""What layers with windows add to costs: what really moves, and the room that a request takes."""

from __future__ import annotations

import pytest
from msgspec import structs

from protocol.layout import KvLayout
from protocol.registration import KeptWindow
from router.routing.caches.cache_index import PrefixMatch
from router.routing.costs import FETCH_MS, HANDOFF_MS, Costs
from router.routing.pairs import Pairs
from router.routing.placement import HeldElsewhere
from scheduling.block_pools import BlockPools
from scheduling.scheduler import Scheduler, SchedulerConfig
from scheduling.step_model import StepModel
from tests.layouts import windowed_layout
from tests.registration import registration
from tests.unit.router.routing.test_tier_costs import BLOCK, load, query
from worker.moved_blocks import kept_windows

WINDOW = KeptWindow(size=5.0, most=40, cover=8)
BYTES = 1000


def pairs_of(*windows: KeptWindow) -> Pairs:
    pairs = Pairs()
    pairs.join(registration("d1", windows=windows, block_bytes=BYTES))
    return pairs


@pytest.mark.parametrize(("windows", "moved"), [((), 50), ((WINDOW,), 90)])
def test_a_fetch_costs_what_moves(windows: tuple[KeptWindow, ...], moved: int) -> None:
    """A fetch is measured by what moved, too: twenty blocks, and as many as the window adds."""
    pairs = pairs_of(*windows)
    pairs.observe_fetch("d2", "d1", 20, 0.1 * (20 + pairs.in_windows(20)))
    asked = query(elsewhere=HeldElsewhere("d2", 50, 0))
    (found,) = Costs(asked, {"d2": PrefixMatch(50, 50)}, pairs).local([load("d1")], alone=True)
    assert found.fetch_tokens == 50 * BLOCK
    assert found.fetch_ms == pytest.approx(FETCH_MS + 0.1 * moved)


def test_a_handoff_is_measured_by_its_bytes_and_costs_what_no_chunk_hides() -> None:
    """The last chunk's blocks, and what the window sees from the end."""
    pairs = pairs_of(WINDOW)
    pairs.observe_handoff("p1", "d1", blocks=63 + 10, num_bytes=113 * BYTES, took_ms=11.3)
    costs, worker = Costs(query(), {}, pairs), load("d1")
    (found,) = costs.remote([worker], 1000.0)
    step_ms = costs.local([worker], alone=True)[0].tpot_ms
    assert found.handoff_ms == pytest.approx(HANDOFF_MS + step_ms + 0.1 * (32 + 40))


def test_what_a_short_computation_does_not_hide_moves_after_it() -> None:
    """The other worker has most of the prompt cached: all of its KV has yet to move."""
    pairs = pairs_of()
    pairs.observe("p1", "d1", 100, 10.0)
    costs, worker = Costs(query(), {}, pairs), load("d1")
    late, soon = (costs.remote([worker], begins_ms)[0].handoff_ms for begins_ms in (1000.0, 1.0))
    step_ms = costs.local([worker], alone=True)[0].tpot_ms
    turns_ms = max(step_ms, 3 * step_ms - 1.0) - step_ms
    assert soon - late == pytest.approx(0.1 * 63 - 1.0 - 0.1 * 32 + turns_ms)


def test_a_request_needs_room_for_its_windows() -> None:
    room = load("d1")
    needed = -(-1000 // BLOCK) + 5 * 40
    free = room.blocks_total - needed
    for claimed, lacks in ((free, 0), (free + 1, BLOCK)):
        busy = structs.replace(room, blocks_claimed=claimed)
        (found,) = Costs(query(), {}, pairs_of(WINDOW)).local([busy], alone=True)
        assert found.shortage_tokens == lacks


def test_workers_say_what_their_windows_keep() -> None:
    def of(layout: KvLayout) -> tuple[KeptWindow, ...]:
        config = SchedulerConfig(4, 8, 4, 16)
        scheduler = Scheduler(config, BlockPools.of(layout, 50), StepModel())
        return kept_windows(scheduler, layout)

    assert of(windowed_layout(4)) == ()
    assert of(windowed_layout(4, 9, 17)) == (
        KeptWindow(2.0, 2 + 2 + 2 * 16 // 4, 2),
        KeptWindow(2.0, 4 + 2 + 2 * 16 // 4, 4),
    )
