"""Units of blocks: each has a name of its own, and its place in the pool."""

from __future__ import annotations

from pathlib import Path

from kv_transfer.tiers.block_file import BlockFile
from kv_transfer.tiers.disk_folder import claim_file
from kv_transfer.tiers.units import Units
from scheduling.block_manager import ColdBlock
from tests.layouts import state_layout
from tests.unit.kv_transfer.tiers.test_disk_tier import SCOPE

A, B = b"a" * 16, b"b" * 14 + b"\0\0"


def test_blocks_of_all_groups_are_whole_numbers_of_units() -> None:
    units = Units([20, 110, 30])
    assert (units.unit_bytes, units.per_block) == (10, (2, 11, 3))
    assert list(units.of_block(1, 2)) == list(range(22, 33))
    cold = units.cold(2, ColdBlock(4, A, 1))
    assert [each.unit for each in cold] == [12, 13, 14]
    assert [each.name for each in cold] == units.names(2, A)


def test_a_state_begins_its_page_and_takes_the_units_that_hold_it() -> None:
    units = Units.of(state_layout(block_size=4, state_numbers=3001))
    assert (units.unit_bytes, units.per_block) == (32, (1, 751))
    page = 24032 // 32
    assert list(units.of_block(1, 2)) == list(range(2 * page, 2 * page + 751))
    assert list(units.of_block(0, 2)) == [2]
    assert len(set(units.names(1, A))) == 751


def test_one_group_is_named_by_its_hashes_alone() -> None:
    assert Units([64]).names(0, A) == [A]
    assert list(Units([64]).of_block(0, 7)) == [7]


def test_names_differ_and_are_found_again_on_disk(tmp_path: Path) -> None:
    units = Units([20, 30])
    names = [n for digest in (A, B) for group in (0, 1) for n in units.names(group, digest)]
    assert len(set(names)) == len(names) == 10
    file = BlockFile(claim_file(tmp_path, SCOPE), SCOPE, 10, 1 << 20, lambda: 1.0)
    for slot, name in enumerate(names):
        file.write(slot, name, memoryview(name[:10]))
    assert [(each.slot, each.name) for each in file.found()] == list(enumerate(names))
    file.close()
