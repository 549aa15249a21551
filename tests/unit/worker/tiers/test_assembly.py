"""Which workers get tiers, and whose blocks they find on disk."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from engine.kv_pool import KvPool
from engine.loader import LoadedEngine
from kv_transfer.tiers.kv_tiers import KvTiers
from protocol.layout import KvLayout
from scheduling.block_pools import BlockPools
from tests.layouts import divisible_layout, windowed_layout
from worker.settings import WorkerSettings
from worker.tiers.assembly import open_tiers

LAYOUT = divisible_layout()
WINDOWED = windowed_layout(2, 5)


def for_peers(layout: KvLayout) -> KvLayout:
    return msgspec.structs.replace(layout, peer_stages=1)


def opened(layout: KvLayout, stack: ExitStack, folder: Path | None = None) -> KvTiers | None:
    """The tiers of a worker with this layout's ranks."""
    disk = {} if folder is None else {"disk_tier_dir": str(folder), "disk_tier_bytes": 1 << 20}
    settings = WorkerSettings(
        model="m",
        redis_url="redis://127.0.0.1:1",
        cluster_secret="a secret of sixteen",
        host_tier_bytes=1 << 16,
        **disk,
    )
    first, *others = (KvPool(each, 16) for each in layout.ranks)
    first.others = others
    pools = BlockPools.of(layout, first.num_pages)
    engine = SimpleNamespace(scheduler=SimpleNamespace(pools=pools))
    loaded = cast(LoadedEngine, SimpleNamespace(pool=first, engine=engine))
    return open_tiers(settings, loaded, lambda: None, stack)


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        LAYOUT.shard(0, 2, 1, 2),
        for_peers(LAYOUT),
        WINDOWED,
        WINDOWED.shard(0, 1, 2, 3),
        for_peers(WINDOWED),
    ],
)
def test_workers_of_any_ranks_and_groups_have_tiers(
    layout: KvLayout, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        assert opened(layout, stack) is not None
    assert "no effect" not in caplog.text


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (LAYOUT.shard(0, 2, 1, 2), LAYOUT),
        (LAYOUT.shard(0, 2, 1, 2), LAYOUT.shard(0, 4)),
        (LAYOUT.shard(0, 2, 1, 2), for_peers(LAYOUT)),
        (WINDOWED.shard(0, 1, 1, 2), WINDOWED),
        (WINDOWED, WINDOWED.shard(0, 1, 2, 3)),
    ],
)
def test_blocks_on_disk_are_of_use_to_any_ranks(
    first: KvLayout, later: KvLayout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other_model = msgspec.structs.replace(first.unsharded, model_fingerprint="n")
    for layout, erases in ((first, False), (later, False), (other_model, True)):
        with ExitStack() as stack:
            assert opened(layout, stack, tmp_path) is not None
        assert ("they are erased" in caplog.text) is erases


def test_workers_whose_ranks_no_process_reaches_have_no_tiers_and_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = WorkerSettings(
        model="m",
        redis_url="redis://127.0.0.1:1",
        cluster_secret="a secret of sixteen",
        host_tier_bytes=1 << 16,
    )
    loaded = cast(LoadedEngine, SimpleNamespace(pool=KvPool(LAYOUT.shard(0, 2), 1)))
    with ExitStack() as stack:
        assert open_tiers(settings, loaded, lambda: None, stack) is None
    assert "host_tier_bytes has no effect: ranks on several cards have no" in caplog.text
