"""Ranks that reach each other by process groups, as those on cards do: here by gloo, on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from engine.attention.base import AttentionBackend, Segment
from engine.backend import CapturedDecodes, Sizes
from engine.checkpoint.shard import Shard
from engine.cpu.backend import CpuBackend
from engine.gpu.graphs import DecodeGraphs, graph_sizes
from engine.kv_pool import KvPool
from engine.loader import load_engine, load_follower
from engine.models.runnable import RunnableModel
from engine.parallel.process_groups import ENVIRONMENT, RankGroups, bind_to_loopback
from engine.parallel.ranks import Ranks, Replay, Step
from engine.parallel.sums import RankLost
from protocol.layout import KvLayout
from tests.unit.engine.parallel.grouped_group import StagedGroups, work_of_ranks
from tests.unit.engine.parallel.sharded_engine import engine_config, generate

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}
UNUSED = 63  # the last block: prompts and tokens are few
CASES = [(dtype, size) for dtype in (torch.float32, torch.bfloat16) for size in (1, 4096, 0)]


def numbers_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def exchanges(ranks: Ranks) -> list[Any]:
    """Sums of several types and sizes, what rank 0 shares, and what it gathers of widths that
    differ."""
    ranks.join()
    sums, rank, size = ranks.sums, ranks.shard.rank, ranks.shard.size
    found = []
    for dtype, count in CASES:
        part = numbers_of(rank, count, dtype)
        sums.add_up(part)
        found.append(part.float())
    sums.meet()
    tokens = torch.arange(7) * (rank == 0)
    sums.share(tokens)
    bounds = [0, 3, 5, 6][: size + 1]
    whole = torch.zeros(2, bounds[-1])
    part = torch.full((2, bounds[rank + 1] - bounds[rank]), float(rank))
    sums.gather(part, bounds, None if rank else whole)
    return [each.tolist() for each in (*found, tokens)] + [None if rank else whole.tolist()]


@pytest.mark.parametrize("kind", [RankGroups, StagedGroups])
def test_ranks_add_up_share_and_gather(kind: type[RankGroups]) -> None:
    answers = work_of_ranks(exchanges, 3, kind=kind)
    for *sums, tokens, _ in answers:
        cases = [
            (dtype, size) for dtype in (torch.float32, torch.bfloat16) for size in (1, 4096, 0)
        ]
        for found, (dtype, size) in zip(sums, cases, strict=True):
            parts = [numbers_of(rank, size, dtype).float() for rank in range(3)]
            near = 1e-5 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(torch.tensor(found), sum(parts), rtol=near, atol=near)
        assert tokens == list(range(7))
    assert answers[0][-1] == [[0.0, 0.0, 0.0, 1.0, 1.0, 2.0]] * 2


def pass_on(ranks: Ranks) -> list[float]:
    """Three steps through all stages; each adds its number."""
    ranks.join()
    given = []
    for step in range(3):
        states = torch.full((2, 4), float(step))
        if ranks.before is not None:
            ranks.before.receive(states)
        states = states + 10 ** (1 + ranks.shard.stage) + ranks.shard.rank
        if ranks.after is not None:
            ranks.after.send(states)
        given.append(float(states[1, 3]))
    ranks.least(0)  # nobody leaves before all has arrived
    return given


@pytest.mark.parametrize("kind", [RankGroups, StagedGroups])
def test_stages_pass_on_hidden_states_in_the_order_of_steps_rank_by_rank(
    kind: type[RankGroups],
) -> None:
    first, second = work_of_ranks(pass_on, 2, num_stages=3, kind=kind)[:2]
    assert first == [1110.0, 1111.0, 1112.0]
    assert second == [1113.0, 1114.0, 1115.0]


class MeasuringBackend(CpuBackend):
    """Measures the memory of a pass first, as a card does: on all ranks at once."""

    def num_blocks(self, model: RunnableModel, layout: KvLayout, sizes: Sizes) -> int:
        assert sizes.sharing == layout.tp_size * layout.num_stages
        pool = KvPool(layout, 1)
        attention = self.attention(pool)
        attention.plan([Segment(3, 3, [0])])
        hidden = model.hidden(torch.zeros(3, dtype=torch.int64), torch.arange(3), attention)
        logits = model.logits(hidden[:2])
        assert logits.shape == (2, model.config.vocab_size)
        leads = layout.rank == 0
        assert all(row.count_nonzero() == len(row) * leads for row in logits)
        return super().num_blocks(model, layout, sizes)


class RecordedGraphs(CpuBackend):
    """Captures decodes as a card would: a replay runs the pass again."""

    captured: ClassVar[list[int]] = []

    can_capture: ClassVar[bool] = True

    def captures(self, sizes: Sizes) -> bool:
        return sizes.captures and self.can_capture

    def graphs(self, model: RunnableModel, pool: KvPool, sizes: Sizes) -> CapturedDecodes:  # type: ignore[override]
        def capture(run: Callable[[], None]) -> Callable[[], None]:
            run()
            return run

        def make(size: int) -> AttentionBackend:
            self.captured.append(size)
            return Padded(self.attention(pool), size)

        return DecodeGraphs(model, make, graph_sizes(sizes.max_sequences), capture)


class Padded:
    """Attention for a fixed number of decodes; those of padding have a block that nobody uses."""

    def __init__(self, own: AttentionBackend, size: int) -> None:
        self._own = own
        self._size = size

    def plan(self, segments: list[Segment]) -> None:
        padding = [Segment(1, 1, [UNUSED])] * (self._size - len(segments))
        self._own.plan([*segments, *padding])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def serve(
    folder: Path, prompts: Any, ranks: Ranks, captures: bool = False, without: int = -1
) -> Any:
    """The leader's tokens, the sizes that each rank has captured, and those that the leader has
    announced. Rank `without` has no kernels that can be captured."""
    config = replace(engine_config(folder), cuda_graphs=captures)
    kind = RecordedGraphs if captures else MeasuringBackend
    RecordedGraphs.captured.clear()
    RecordedGraphs.can_capture = ranks.shard.number != without
    with (
        mock.patch("engine.cpu.backend.CpuBackend", kind),
        mock.patch.object(CpuBackend, "fuse", return_value=None),
    ):
        if ranks.shard.number:
            follower, _ = load_follower(config, ranks)
            follower.run()
            return None, list(RecordedGraphs.captured), []
        engine = load_engine(config, lambda: 0.0, ranks=ranks).engine
        announced: list[int] = []
        tell = ranks._tell

        def note(message: Any, first: int, end: int) -> None:
            if isinstance(message, Replay):
                announced.append(message.size)
            tell(message, first, end)

        with mock.patch.object(Ranks, "_tell", lambda self, *arguments: note(*arguments)):
            tokens = generate(engine, prompts)
        ranks.announce(None)
        return tokens, list(RecordedGraphs.captured), announced


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2), (2, 2)])
def test_tokens_equal_those_of_one_rank(
    make_tiny: Any, text: Any, size: int, num_stages: int
) -> None:
    tiny = make_tiny("Qwen3ForCausalLM", **SIZES)
    prompts = (tuple(text(21)), tuple(text(40)[21:]), tuple(text(45)[40:]))
    expected = generate(load_engine(engine_config(tiny.folder), lambda: 0.0).engine, prompts)
    answers = work_of_ranks(partial(serve, tiny.folder, prompts), size, num_stages)
    assert answers[0][0] == expected


def test_ranks_capture_the_same_graphs_and_replay_what_the_leader_announces(
    make_tiny: Any, text: Any
) -> None:
    tiny = make_tiny("LlamaForCausalLM", **SIZES)
    prompts = (tuple(text(21)), tuple(text(40)[21:]), tuple(text(45)[40:]))
    expected = generate(load_engine(engine_config(tiny.folder), lambda: 0.0).engine, prompts)
    head, hand = work_of_ranks(partial(serve, tiny.folder, prompts, captures=True), 2)
    assert head[0] == expected
    assert head[1] == hand[1] == [4, 2, 1], "the largest first, in one order on all ranks"
    assert set(head[2]) == {2, 4}, "three decodes are padded to four"


def test_no_rank_captures_what_one_of_them_cannot(make_tiny: Any, text: Any) -> None:
    tiny = make_tiny("LlamaForCausalLM", **SIZES)
    prompts = (tuple(text(21)),)
    expected = generate(load_engine(engine_config(tiny.folder), lambda: 0.0).engine, prompts)
    work = partial(serve, tiny.folder, prompts, captures=True, without=1)
    head, hand = work_of_ranks(work, 2)
    assert head == (expected, [], [])
    assert hand[1] == []


def test_a_rank_that_has_captured_another_size_says_so() -> None:
    from engine.parallel.captured import replay

    graphs = mock.Mock()
    graphs.padded.return_value = 8
    step = Step.of([Segment(1, 5, [0])] * 3, [])
    with pytest.raises(RankLost, match="rank 0 replays 4 decodes"):
        replay(graphs, Replay(4, step))
    graphs.padded.return_value = 4
    replay(graphs, Replay(4, step))
    (tokens, positions, segments), _ = graphs.logits.call_args
    assert (tokens, positions, len(segments)) == ([0, 0, 0], [4, 4, 4], 3)


def lose(ranks: Ranks) -> str:
    """The last rank never comes to the second sum."""
    ranks.join()
    part = torch.ones(4)
    ranks.sums.add_up(part)
    if ranks.shard.rank == ranks.shard.size - 1:
        return "ended"
    try:
        ranks.sums.add_up(part)
    except RankLost as error:
        return str(error)
    return "added up"


def test_a_rank_that_ends_is_lost_to_the_others() -> None:
    first, second = work_of_ranks(lose, 2)
    assert second == "ended"
    assert first.startswith("a rank of this worker does not answer: ")


def test_nccl_connects_cards_and_gloo_what_shares_one() -> None:
    card, shard = torch.device("cuda", 0), Shard(0, 2)
    apart, together = (RankGroups(shard, card, 0, 1.0, sharing) for sharing in (1, 2))
    on_cpu = RankGroups(shard, torch.device("cpu"), 0, 1.0)
    assert [each.backend for each in (apart, together, on_cpu)] == ["nccl", "gloo", "gloo"]
    assert [each.is_captured for each in (apart, together, on_cpu)] == [True, False, False]
    assert [each.is_staged for each in (apart, together, on_cpu)] == [False, True, False]


def test_ports_are_on_the_loopback_interface_unless_the_environment_says_another() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "eth1"}
    bind_to_loopback(environment)
    assert environment == ENVIRONMENT | {"NCCL_SOCKET_IFNAME": "eth1"}
    assert ENVIRONMENT["NCCL_SOCKET_IFNAME"] == "=lo"
