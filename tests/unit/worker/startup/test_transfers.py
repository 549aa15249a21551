"""The descriptor with which peers reach a worker's pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from engine.kv_pool import KvPool
from engine.loader import LoadedEngine
from kv_transfer.authentication import verify_descriptor
from kv_transfer.service import TransferService
from kv_transfer.transports.interface import PoolMemory
from protocol.layout import KvLayout
from tests.layouts import divisible_layout, windowed_layout
from worker.settings import WorkerSettings
from worker.startup.transfers import register_pool

LAYOUT = divisible_layout()
SETTINGS = WorkerSettings(
    model="m", redis_url="redis://127.0.0.1:1", cluster_secret="a secret of sixteen"
)


class Transfers:
    """A transfer service that keeps the pool that it was told to register."""

    transport_name, agent = "fake", "fake-agent"

    def register(self, pool: PoolMemory) -> bytes:
        self.pool = pool
        return b"where"


@pytest.mark.parametrize(
    ("whole", "tp_size", "num_stages"),
    [
        (LAYOUT, 1, 1),
        (LAYOUT, 2, 2),
        (msgspec.structs.replace(LAYOUT, peer_stages=1), 1, 1),
        (windowed_layout(2, 5, 9), 1, 1),
        (windowed_layout(2, 5, 9), 1, 3),
    ],
)
def test_peers_learn_the_layout_unless_blocks_lie_as_on_one_rank(
    whole: KvLayout, tp_size: int, num_stages: int
) -> None:
    layout = whole.shard(0, tp_size, num_stages - 1, num_stages)
    first, *others = (KvPool(each, 40) for each in layout.ranks)
    first.others = others
    transfers = Transfers()
    loaded = cast(LoadedEngine, SimpleNamespace(pool=first))
    told = register_pool(SETTINGS, loaded, cast(TransferService, cast(Any, transfers)))
    assert told.layout == (None if layout == whole.unsharded else layout)
    verify_descriptor(
        SETTINGS.cluster_secret.encode(),
        told.agent,
        told.descriptor,
        told.num_blocks,
        told.digest,
        told.layout,
    )
    assert transfers.pool.is_sound
    assert len(transfers.pool.groups) == len(layout.groups)
    assert len(transfers.pool.parts) == tp_size * num_stages
