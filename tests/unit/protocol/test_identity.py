"""Block hashes and layout fingerprints: equal exactly when the KV is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ConfigError
from protocol.hashing import block_hashes, chain_root, next_hash, seed_of
from protocol.layout import SPLIT, KvGroup, KvLayout, stage_layers

FIXED = "7e3990552b8f83c4744f6681822ffb4d"
FIXED_LAYOUT = "003bfa30574c4d979f775de447574b20"
LAYOUT = KvLayout(
    model_fingerprint="m", dtype="bfloat16", num_layers=3, num_kv_heads=2, block_size=16, head_dim=8
)


def test_only_full_blocks_have_a_hash_and_each_depends_on_all_before() -> None:
    root = chain_root("m")
    hashes = block_hashes(root, list(range(11)), 4)
    assert len(hashes) == 2
    assert hashes[0] == next_hash(root, [0, 1, 2, 3])
    assert hashes[1] == next_hash(hashes[0], [4, 5, 6, 7])
    assert block_hashes(root, [9, 1, 2, 3, 4, 5, 6, 7], 4)[1] != hashes[1]
    assert block_hashes(root, [0, 1, 2], 4) == []


def test_whatever_changes_the_kv_changes_the_root() -> None:
    roots = {
        chain_root("m"),
        chain_root("n"),
        chain_root("m", salt="t"),
        chain_root("m", seed="s"),
        chain_root("mt", salt=""),
        chain_root("", salt="mt"),
    }
    assert len(roots) == 6


def test_hashes_mean_the_same_in_every_process() -> None:
    # A fixed value: a fleet of mixed versions and hosts shares prefixes only if it never changes.
    assert next_hash(chain_root("m", seed="baton"), [1, 2, 3, 4]).hex() == FIXED


def test_fleets_with_other_secrets_have_other_hashes() -> None:
    assert seed_of("a secret of sixteen") == seed_of("a secret of sixteen")
    assert seed_of("a secret of sixteen") != seed_of("a secret of seventeen")
    assert "secret" not in seed_of("a secret of sixteen")


@settings(derandomize=True)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8))
def test_prefixes_of_texts_have_prefixes_of_hashes(tokens: list[int], size: int) -> None:
    root = chain_root("m")
    whole = block_hashes(root, tokens, size)
    assert len(whole) == len(tokens) // size
    for cut in range(len(tokens)):
        part = block_hashes(root, tokens[:cut], size)
        assert part == whole[: len(part)]


def test_blocks_whose_heads_are_not_in_one_piece_have_no_shards() -> None:
    split = msgspec.structs.replace(LAYOUT, order=SPLIT)
    assert split.shard(0, 1) == split
    with pytest.raises(ConfigError, match="'split' cannot be shared out"):
        split.shard(0, 2)


def test_stages_have_all_layers_in_order_the_first_ones_more() -> None:
    for num_layers in range(1, 9):
        for num_stages in range(1, num_layers + 1):
            stages = [stage_layers(num_layers, stage, num_stages) for stage in range(num_stages)]
            assert [layer for each in stages for layer in each] == list(range(num_layers))
            lengths = [len(each) for each in stages]
            assert lengths == sorted(lengths, reverse=True)
            assert lengths[0] - lengths[-1] <= 1


def test_ranks_are_numbered_from_the_last_stage() -> None:
    ranks = LAYOUT.shard(0, 2, 0, 3).ranks
    assert [(each.stage, each.tp_rank) for each in ranks] == [
        (2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)
    ]  # fmt: skip
    assert [each.rank for each in ranks] == list(range(6))
    assert {each.unsharded for each in ranks} == {LAYOUT}


def test_a_fingerprint_names_stages_only_where_there_are_some() -> None:
    """Blocks on disks carry it."""
    assert LAYOUT.fingerprint == "003bfa30574c4d979f775de447574b20"


def test_parts_of_states_are_shared_out_like_heads() -> None:
    states = (KvGroup((0, 2)), KvGroup((1,), 2, state_numbers=12, state_parts=2))
    hybrid = msgspec.structs.replace(LAYOUT, num_layers=3, grouping=states)
    assert hybrid.shard(0, 1) == hybrid
    assert hybrid.of_group(1).block_shape == (1, 1, 2, 1, 6)
    assert hybrid.block_bytes == hybrid.of_group(0).block_bytes, "of keys and values alone"
    assert hybrid.shard(1, 2).of_group(1).heads == range(1, 2)
    assert hybrid.shard(1, 2).of_group(1).block_bytes == 6 * 4
    stages = [hybrid.shard(0, 1, stage, 3) for stage in range(3)]
    assert [each.of_group(1).block_shape[0] for each in stages] == [0, 1, 0]
    assert [each.of_group(0).layers for each in stages] == [range(1), range(1, 1), range(1, 2)]


@pytest.mark.parametrize(
    ("numbers", "parts", "ranks", "refused"),
    [(12, 2, 4, "12 numbers in 2 parts cannot be split over 4 ranks"), (13, 2, 1, "13 numbers")],
)
def test_states_that_cannot_be_split_are_refused(
    numbers: int, parts: int, ranks: int, refused: str
) -> None:
    states = (KvGroup((0, 2)), KvGroup((1,), 2, numbers, parts))
    layout = msgspec.structs.replace(LAYOUT, num_layers=3, num_kv_heads=4, grouping=states)
    with pytest.raises(ConfigError, match=refused):
        layout.shard(0, ranks)


def test_block_bytes_counts_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.block_bytes == 3 * 2 * 2 * 16 * 8 * 2


def test_a_block_of_latents_has_one_row_per_token_and_layer() -> None:
    latents = msgspec.structs.replace(LAYOUT, num_planes=1, num_kv_heads=1, head_dim=576)
    assert latents.block_shape == (3, 1, 1, 16, 576)
    assert latents.block_bytes == 3 * 16 * 576 * 2
    assert latents.unsharded == latents


def test_the_fingerprint_of_keys_and_values_is_that_of_layouts_without_planes() -> None:
    # A fixed value: workers of two versions share blocks only if it never changes.
    assert LAYOUT.fingerprint == FIXED_LAYOUT


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": "n"},
        {"dtype": "float16"},
        {"num_layers": 4},
        {"num_kv_heads": 1},
        {"block_size": 32},
        {"head_dim": 16},
        {"tp_size": 2},
        {"num_planes": 1},
        {"tp_size": 2, "tp_rank": 1},
        {"num_stages": 3},
        {"num_stages": 3, "stage": 2},
    ],
)
def test_layouts_that_differ_have_other_fingerprints(change: dict[str, int | str]) -> None:
    assert msgspec.structs.replace(LAYOUT, **change).fingerprint != LAYOUT.fingerprint
    assert msgspec.structs.replace(LAYOUT).fingerprint == LAYOUT.fingerprint
