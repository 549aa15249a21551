"""Workers of several ranks on cards: tokens beside one rank's, sums in graphs, and their times.

Two ranks on one card reach each other by gloo, which NCCL refuses to do: that checks the logic and
no speed. NCCL's sums are captured in a graph by a group of one rank. What several cards add up, and
how fast, needs several.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.gpu.card import Row
from engine.checkpoint.shard import Shard
from engine.engine_config import EngineConfig
from engine.gpu.graphs import CudaCapture
from engine.loader import LoadedEngine, load_engine
from engine.parallel.group_sums import GroupSums
from engine.parallel.process_groups import RankGroups
from engine.parallel.symmetric_sums import AUTO, NCCL
from protocol.sampling import SamplingParams
from scheduling.scheduler import SchedulerConfig
from scheduling.sequence import Sequence as Tokens
from worker.ranks.head import Hands
from worker.ranks.processes import HandSettings

_LIMIT_S = 120.0
_GREEDY = SamplingParams(max_tokens=32, seed=0, temperature=0.0)


@dataclass(frozen=True)
class RankLoad:
    """Prompts of so many tokens that run at once, on layouts: ranks of a stage, and stages."""

    layouts: Sequence[tuple[int, int]]
    prompts: Sequence[int] = (300, 65, 17, 130)
    block_size: int = 16
    num_blocks: int = 256


def check_ranks(
    folder: Path, devices: Sequence[str], load: RankLoad, ways: Sequence[str] = (AUTO,)
) -> Iterator[Row]:
    """Greedy tokens of ranks on `devices`, in fp32 and without graphs, where one rank's are equal;
    in bf16 with graphs, the time of a step of decodes."""
    config = _config(folder, devices[0], load)
    exact = replace(config, dtype="float32", attention="torch", cuda_graphs=False)
    expected, _ = _tokens(load_engine(exact, time.monotonic), load)
    for layout in load.layouts:
        found, _ = _on_ranks(exact, devices, layout, load)
        equal = sum(a == b for a, b in zip(expected, found, strict=True))
        note = f"of {len(expected)} prompts, fp32"
        yield Row("ranks", f"{_name(layout)}: equal to one rank", equal, "prompts", note=note)
    if len(set(devices)) < len(devices):  # they share a device, and add up over gloo
        return
    for layout in load.layouts:
        for way in ways:
            _, step_s = _on_ranks(replace(config, card_sums=way), devices, layout, load)
            name = f"{_name(layout)}, sums {way}: a step of decodes"
            yield Row("ranks", name, step_s * 1e3, "ms")


def check_captured_sums(device: torch.device) -> Iterator[Row]:
    """NCCL's sums in a graph, by a group of one rank: replays leave a part as it is."""
    file = os.memfd_create("bench-ranks")
    groups = RankGroups(Shard(0, 1), device, file, _LIMIT_S, wanted=NCCL)
    groups.open()
    try:
        sums = GroupSums(groups)
        part = torch.arange(4096, dtype=torch.float32, device=device)
        expected = part + 3

        def run() -> None:
            part.add_(1)
            sums.share(part)
            sums.add_up(part)

        replay = CudaCapture()(run)  # two passes of warming up
        replay()
        torch.cuda.synchronize(device)
        wrong = int((part != expected).sum())
        yield Row("ranks", "sums captured in a graph", wrong, "wrong", goal="0")
    finally:
        groups.close()
        os.close(file)


def layouts_on(num_cards: int) -> list[tuple[int, int]]:
    """Layouts of two and of four ranks, as far as there are cards."""
    layouts = [(2, 1), (1, 2), (4, 1), (2, 2)]
    return [(size, stages) for size, stages in layouts if size * stages <= num_cards]


def _on_ranks(
    config: EngineConfig, devices: Sequence[str], layout: tuple[int, int], load: RankLoad
) -> tuple[list[list[int]], float]:
    size, num_stages = layout
    lost: list[str] = []
    hands = Hands(
        HandSettings(
            config,
            size,
            1,
            "warning",
            "text",
            "bench",
            num_stages,
            devices=tuple(devices[: size * num_stages]),
        ),
        lost.append,
        _LIMIT_S,
    )
    try:

        def allocate(num_bytes: int) -> memoryview | None:
            return hands.allocate(num_bytes, lambda size: None)

        return _tokens(load_engine(config, time.monotonic, allocate, ranks=hands.ranks), load)
    finally:
        hands.close()


def _tokens(loaded: LoadedEngine, load: RankLoad) -> tuple[list[list[int]], float]:
    """The tokens of each prompt, and the seconds of a step of decodes."""
    engine, vocab_size = loaded.engine, loaded.config.vocab_size
    sequences = []
    for number, length in enumerate(load.prompts):
        tokens = [(7 * number + 3 * place) % vocab_size for place in range(length)]
        sequences.append(
            Tokens(
                request_id=f"r{number}",
                attempt=0,
                tokens=tokens,
                num_prompt=length,
                sampling=_GREEDY,
                root_hash=b"bench",
                block_size=load.block_size,
                arrival=0.0,
                deadline=float("inf"),
            )
        )
        engine.scheduler.add(sequences[-1])
    steps: list[float] = []
    while engine.scheduler.has_work:
        batch, started = engine.plan(), time.perf_counter()
        engine.run(batch)
        if not batch.chunks:
            steps.append(time.perf_counter() - started)
    loaded.grammars.close()
    median = sorted(steps)[len(steps) // 2]
    return [each.tokens[each.num_prompt :] for each in sequences], median


def _config(folder: Path, device: str, load: RankLoad) -> EngineConfig:
    scheduler = SchedulerConfig(
        block_size=load.block_size,
        max_batch_size=len(load.prompts),
        chunk_min_tokens=load.block_size,
        chunk_max_tokens=128,
    )
    return EngineConfig(folder, scheduler, device=device, num_blocks=load.num_blocks)


def _name(layout: tuple[int, int]) -> str:
    size, num_stages = layout
    return f"{size} ranks in each of {num_stages} stages"
