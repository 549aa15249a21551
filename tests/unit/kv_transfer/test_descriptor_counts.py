"""Descriptors of a handoff between any two workers of up to eight ranks: the pieces that each pair
of ranks shares, by the plan that transports follow."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from kv_transfer.head_slices import num_pieces, plan_shares
from protocol.layout import KvLayout, group_layers

TOKENS = 8192
MOST = 1000
LLAMA_70B = KvLayout(
    model_fingerprint="llama",
    dtype="bfloat16",
    num_layers=80,
    num_kv_heads=8,
    block_size=16,
    head_dim=128,
)
RANKS = [(size, stages) for size in (1, 2, 4, 8) for stages in range(1, 9) if size * stages <= 8]
OTHERS = {
    "32 heads": {"num_layers": 32, "num_kv_heads": 32},
    "4 heads, 94 layers": {"num_layers": 94, "num_kv_heads": 4},
    "windows": {"grouping": group_layers([4096, 4096, 4096, 4096, None] * 16, 8192)},
    "latents": {"num_layers": 61, "num_kv_heads": 1, "head_dim": 576, "num_planes": 1},
}


def worker(layout: KvLayout, own: tuple[int, int], peers: tuple[int, int]) -> KvLayout:
    """Rank 0 of a worker with ranks `own` that knows those of its peers."""
    peer_stages = 0 if own[0] == peers[0] else peers[1]
    layout = msgspec.structs.replace(layout, peer_stages=peer_stages)
    return layout.shard(0, own[0], 0, own[1])


def most_descriptors(layout: KvLayout, source: tuple[int, int], target: tuple[int, int]) -> int:
    """Of any pair of ranks, for a prompt of 8,192 tokens."""
    by_group = plan_shares(worker(layout, source, target), worker(layout, target, source))
    counts = [count for shares in by_group for count in num_pieces(shares).values()]
    return max(counts) * TOKENS // layout.block_size


@pytest.mark.parametrize("source", RANKS, ids=str)
def test_each_pair_of_ranks_shares_one_piece_of_a_block(source: tuple[int, int]) -> None:
    for target in RANKS:
        assert most_descriptors(LLAMA_70B, source, target) == 512 < MOST, target


@pytest.mark.parametrize("name", OTHERS)
def test_so_do_those_of_other_models(name: str) -> None:
    layout = msgspec.structs.replace(LLAMA_70B, **OTHERS[name])
    for source, target in itertools.product([(1, 1), (2, 3), (4, 2), (8, 1)], repeat=2):
        assert most_descriptors(layout, source, target) == 512, (source, target)


def test_workers_that_do_not_know_their_peers_share_pieces_of_each_layer() -> None:
    one, two, four = (LLAMA_70B.shard(0, size) for size in (1, 2, 4))
    assert set(num_pieces(plan_shares(two, four)[0]).values()) == {2 * 80}
    known = worker(LLAMA_70B, (2, 1), (1, 1))
    assert set(num_pieces(plan_shares(one, known)[0]).values()) == {4 * 2 * 80}


def test_workers_with_equal_ranks_move_whole_blocks_in_any_order() -> None:
    of_two = worker(LLAMA_70B, (2, 2), (4, 3))
    (shares,) = plan_shares(of_two, of_two)
    assert all(share.is_whole for share in shares)
    assert len(shares) == 4
