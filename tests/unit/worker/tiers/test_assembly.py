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
from tests.layouts import windowed_layout
from worker.settings import WorkerSettings
from worker.tiers.assembly import open_tiers

LAYOUT = KvLayout(
    model_fingerprint="m",
    dtype="float32",
    num_layers=2,
    num_kv_heads=4,
    block_size=2,
    head_dim=4,
)
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
    ("layout", "has_tiers"),
    [
        (LAYOUT, True),
        (LAYOUT.shard(0, 2, 1, 2), True),
        (for_peers(LAYOUT), True),
        (WINDOWED, True),
        (WINDOWED.shard(0, 1, 2, 3), False),
        (for_peers(WINDOWED), False),
    ],
)
def test_layers_in_groups_have_tiers_on_one_rank_only(
    layout: KvLayout, has_tiers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        assert (opened(layout, stack) is not None) is has_tiers
    assert ("layers in groups have no tiers" in caplog.text) is not has_tiers


@pytest.mark.parametrize("later", [LAYOUT, LAYOUT.shard(0, 4), for_peers(LAYOUT)])
def test_blocks_on_disk_are_of_use_to_any_ranks(
    later: KvLayout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other_model = msgspec.structs.replace(LAYOUT, model_fingerprint="n")
    for layout, erases in ((LAYOUT.shard(0, 2, 1, 2), False), (later, False), (other_model, True)):
        with ExitStack() as stack:
            assert opened(layout, stack, tmp_path) is not None
        assert ("they are erased" in caplog.text) is erases
