"""Groups of layers: what a prefix match finds, how pages are shared, and what sequences hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.layout import KvLayout, group_layers
from protocol.retention import RetentionHint
from scheduling.batch import Batch
from scheduling.block_manager import BlockManager
from scheduling.block_pools import BlockPools
from scheduling.load_report import load_report
from scheduling.scheduler import Scheduler, SchedulerConfig
from scheduling.sequence import Sequence, SequenceState
from scheduling.step_model import StepModel
from tests.effort import times
from tests.specification.window_model import DESIGN, THREE, Rules, check
from tests.unit.scheduling.scheduler_harness import BLOCK, drain, make_sequence, run_step

WINDOWS = st.lists(st.sampled_from([None, 3, 5, 8, 9, 17]), min_size=1, max_size=6)


def layout_of(windows: list[int | None], block_size: int = BLOCK) -> KvLayout:
    return KvLayout(
        model_fingerprint="x",
        dtype="float32",
        num_layers=len(windows),
        num_kv_heads=1,
        block_size=block_size,
        head_dim=8,
        grouping=group_layers(windows, 10**6),
    )


def scheduler_of(
    windows: list[int | None], num_pages: int, block_size: int = BLOCK, chunk: int = 16
) -> Scheduler:
    config = SchedulerConfig(block_size, 8, block_size, chunk)
    pools = BlockPools.of(layout_of(windows, block_size), num_pages)
    return Scheduler(config, pools, StepModel(0.001, 0.001, 0.0))


def test_the_rules_of_windows_hold_and_wrong_ones_are_found() -> None:
    assert check(DESIGN) == (True, True)
    assert check(Rules(holds_quota=False)) == (True, False), "prompts wait for each other's memory"
    assert check(Rules(waits_for_landing=False)) == (False, True), "a step reads what is given back"
    assert check(Rules(pays_for_shared=False)) == (True, False)


@pytest.mark.nightly
def test_the_rules_of_windows_hold_for_three_prompts() -> None:
    assert check(DESIGN, THREE) == (True, True)


@settings(deadline=None, max_examples=times(40, nightly=600))
@given(WINDOWS, st.data())
def test_a_match_is_the_longest_prefix_at_whose_end_every_group_can_go_on(
    windows: list[int | None], data: st.DataObject
) -> None:
    pools = BlockPools.of(layout_of(windows), 100)
    chain = [bytes([number]) for number in range(12)]
    held = []
    for manager in pools.managers:
        cached = data.draw(st.sets(st.sampled_from(range(12))) | st.just(set(range(12))))
        for number, block in enumerate(manager.allocate(12)):
            if number in cached:
                manager.publish(block, chain[number])
        held.append(cached)

    def can_go_on(end: int) -> bool:
        """By the definition: the next token sees `window` tokens, itself included."""
        position = end * BLOCK
        return all(
            set(range(0 if w is None else max(0, position - w + 1) // BLOCK, end)) <= cached
            for w, cached in zip(
                [group.window for group in layout_of(windows).groups], held, strict=True
            )
        )

    longest = max(end for end in range(13) if can_go_on(end))
    prefix = pools.match(chain)
    assert prefix.num_blocks == longest
    for rule, manager, blocks in zip(pools.rules, pools.managers, prefix.blocks, strict=True):
        assert blocks == [
            manager.match([digest])[0] for digest in chain[rule.covers_from(longest) : longest]
        ]


@settings(deadline=None, max_examples=times(30, nightly=600))
@given(WINDOWS, st.integers(0, 8), st.data())
def test_what_tiers_add_to_a_prefix_ends_where_every_group_can_go_on(
    windows: list[int | None], first: int, data: st.DataObject
) -> None:
    pools = BlockPools.of(layout_of(windows), 100)
    chain = [bytes([number]) for number in range(12)]
    found = st.sets(st.sampled_from(range(first, 12))) | st.just(set(range(12)))
    held = [data.draw(found) for _ in pools.rules]

    def can_go_on(end: int) -> bool:
        needed = pools.needed(first, end)
        assert [group for group, _ in needed] == list(range(len(held)))
        return all(set(indices) <= held[group] for group, indices in needed)

    end = pools.reach(chain, first, lambda group, digest: digest[0] in held[group])
    assert end == max(each for each in range(first, 13) if can_go_on(each))
    of_block, of_windows = pools.run_bytes(end - first, [10**group for group in range(len(held))])
    moved = sum(10**group * len(indices) for group, indices in pools.needed(first, end))
    assert (end - first) * of_block + of_windows == moved


@settings(deadline=None, max_examples=times(30, nightly=500))
@given(WINDOWS, st.integers(10, 40), st.booleans(), st.data())
def test_what_has_begun_never_waits_for_memory_and_all_ends(
    windows: list[int | None], num_pages: int, is_ahead: bool, data: st.DataObject
) -> None:
    """Prompts over few tokens share prefixes; some end here, and keep their blocks for a while."""
    scheduler = scheduler_of(windows, num_pages)
    kept: list[Sequence] = []
    for number in range(data.draw(st.integers(1, 8))):
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=60))
        prefill_only = data.draw(st.booleans())
        most = data.draw(st.integers(1, 20))
        sequence = make_sequence(str(number), prompt, most, prefill_only=prefill_only)
        try:
            scheduler.add(sequence)
        except ValueError:
            continue
        if prefill_only:
            kept.append(sequence)
    under_way: list[Batch] = []
    for _ in range(3000):
        batch = scheduler.schedule(0.0)
        check_tables(scheduler)
        idle = batch.is_empty and not batch.preempted and not under_way
        if not batch.is_empty:
            scheduler.launched(batch)
            under_way.append(batch)
        while len(under_way) > int(is_ahead and not batch.is_empty):
            land(scheduler, under_way.pop(0))
        done = [each for each in kept if each.state is SequenceState.FINISHED]
        if done and (idle or data.draw(st.booleans())):
            kept.remove(done[0])
            scheduler.release_blocks(done[0])
        elif idle:
            assert not scheduler.sequences, "something waits, and nothing will wake it"
            break
    scheduler.pools.check()
    assert not scheduler.sequences
    assert scheduler.blocks_used == 0


def land(scheduler: Scheduler, batch: Batch) -> None:
    scheduler.landed(batch)
    gone = [each for each in batch.sequences if each.state is SequenceState.FINISHED]
    left = batch.without(gone)
    scheduler.commit(left, [0] * len(left.sampled), 0.0)


def check_tables(scheduler: Scheduler) -> None:
    """Blocks in tables are pinned, no table exceeds its group's quota by more than its prefix, and
    what steps under way read is still there."""
    scheduler.pools.check()
    for sequence in scheduler.sequences:
        for table, manager, rule in zip(
            sequence.tables, scheduler.pools.managers, scheduler.pools.rules, strict=True
        ):
            assert all(manager.is_pinned(block) for block in table.blocks)
            if table.blocks and rule.window is not None:
                start = min(sequence.unlanded, default=sequence.num_computed)
                assert table.first * BLOCK <= max(0, start - rule.window + 1)
                most = rule.held(1000, scheduler.config.chunk_max_tokens)
                assert len(table.blocks) <= most


@pytest.mark.parametrize("windows", [[None, 128], [128]], ids=["mixed", "windows only"])
def test_a_window_of_128_over_a_prompt_of_4096_keeps_what_the_formula_says(
    windows: list[int | None],
) -> None:
    scheduler = scheduler_of(windows, 400, block_size=16, chunk=512)
    prompt = [number % 97 for number in range(4096)]
    scheduler.add(sequence := make_sequence("a", prompt, block_size=16, prefill_only=True))
    windowed, most = scheduler.pools.managers[-1], 0
    while scheduler.has_work:
        run_step(scheduler)
        most = max(most, windowed.num_pinned)
    assert most == 8 + 2 + 2 * 512 // 16, "the window, a boundary, and two steps"
    assert sequence.tables[-1].first == 4096 // 16 - 1 - 8
    if len(windows) > 1:
        assert len(sequence.block_table) == 256
    scheduler.release_blocks(sequence)
    assert scheduler.blocks_used == 0


def test_a_prompt_that_diverges_early_goes_on_from_a_checkpoint() -> None:
    """A window block outside of checkpoints is evicted first, a checkpoint with its prefix."""
    scheduler = scheduler_of([None, 5], num_pages=40)
    every = scheduler.pools.checkpoint_blocks * BLOCK
    prompt = [number % 89 for number in range(2 * every + 9)]
    scheduler.add(make_sequence("a", prompt, 1))
    drain(scheduler)
    filler = [90 + number % 7 for number in range(40)]
    scheduler.add(make_sequence("b", filler, 1))
    drain(scheduler)
    scheduler.add(again := make_sequence("c", [*prompt[: every + 5], 88, 88], 1))
    run_step(scheduler)
    assert again.num_cached >= every // BLOCK * BLOCK


@pytest.mark.parametrize("windows", [[None, 5], [5]], ids=["mixed", "windows only"])
def test_what_has_left_a_window_is_withdrawn_with_the_rest(windows: list[int | None]) -> None:
    scheduler = scheduler_of(windows, num_pages=60)
    prompt = [number % 89 for number in range(100)]
    scheduler.add(sequence := make_sequence("a", prompt, 4))
    while sequence.num_output == 0:
        run_step(scheduler)
    assert scheduler.pools.match(sequence.hashes).num_blocks
    scheduler.withdraw(sequence)
    assert all(manager.num_cached == 0 for manager in scheduler.pools.managers)
    scheduler.finish(sequence)
    scheduler.pools.check()
    assert scheduler.pools.match(sequence.hashes).num_blocks == 0
    scheduler.add(again := make_sequence("b", prompt, 4))
    drain(scheduler)
    scheduler.pools.check()
    assert again.num_cached == 0


def test_hints_protect_nothing_in_large_pages() -> None:
    """So reports name no protected blocks."""
    scheduler = scheduler_of([None, 5], num_pages=60)
    hint = RetentionHint(seconds=60)
    scheduler.add(make_sequence("a", list(range(50)), 1, retention=hint))
    drain(scheduler)
    assert load_report(scheduler, worker_id="w", incarnation="i").blocks_retained == 0


def test_reports_count_pages_in_blocks_of_the_first_group() -> None:
    scheduler = scheduler_of([None, 5, 5, 5, 5], num_pages=24)
    scheduler.add(sequence := make_sequence("a", list(range(50)), 1, prefill_only=True))
    drain(scheduler)
    report = load_report(scheduler, worker_id="w", incarnation="i")
    num_pages = -(-len(sequence.block_table) // 4) + len(sequence.tables[1].blocks)
    assert (report.blocks_total, report.blocks_used) == (24 * 4, num_pages * 4)
    scheduler.release_blocks(sequence)
    report = load_report(scheduler, worker_id="w", incarnation="i")
    assert report.blocks_used == 0
    assert report.blocks_cached >= num_pages * 4, "those that left the window, too"


def test_one_group_without_a_window_has_a_plain_manager() -> None:
    """So it allocates, evicts and reports as if there were no groups."""
    pools = BlockPools.of(layout_of([None, None]), 10)
    assert [type(manager) for manager in pools.managers] == [BlockManager]
    assert (pools.num_pages, pools.in_blocks(10)) == (10, 10)


def test_pages_that_one_group_gave_back_serve_another() -> None:
    """Four windowed layers beside one that keeps all: a page holds four blocks or one."""
    scheduler = scheduler_of([None, 5, 5, 5, 5], num_pages=24)
    full, windowed = scheduler.pools.managers
    assert [rule.blocks_per_page for rule in scheduler.pools.rules] == [4, 1]
    for name in "abc":
        start = ord(name) * 100
        scheduler.add(make_sequence(name, list(range(start, start + 50)), 1))
        drain(scheduler)
        assert scheduler.blocks_used == 0
    assert full.num_cached
    assert windowed.num_cached
    assert full.num_free == windowed.num_free * 4
