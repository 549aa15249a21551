"""Workers whose ranks each have a pool and a NIXL agent of their own hand KV blocks over: their
answers beside one worker's, in fp32.

NCCL refuses ranks that share a card, so those use gloo (`bench.tools.worker_apart`): that checks
the logic, and NIXL between pools of one card, but not speed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.card import Row
from bench.gpu.fleets import complete
from bench.gpu.models import first_difference
from bench.tools import worker_apart
from bench.tools.fleet import BenchFleet, FleetConfig
from engine.checkpoint.config import load_model_config
from protocol.errors import BatonError

_COUNTS_S = 30.0
_POLL_S = 0.05
ONE = (1, 1)

Layout = tuple[int, int]
"""Ranks of a stage, and stages."""
ON_CARDS = (((2, 1), (2, 1)), ((2, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 1), ONE))
"""Prefill and decode workers that two cards can hold, or four cards one beside the other."""


@dataclass(frozen=True)
class ExchangeLoad:
    """Prompts of `prompts` tokens, one after the other, for each pair of workers: first the prefill
    worker's layout, then the decode worker's."""

    pairs: Sequence[tuple[Layout, Layout]] = (((2, 1), (1, 2)), ((1, 2), ONE), (ONE, (2, 1)))
    prompts: Sequence[int] = (300, 65, 17, 130)
    num_output: int = 16
    num_blocks: int = 256


def check_exchange(
    part: str, folder: Path, devices: tuple[str, str], load: ExchangeLoad, is_shared: bool
) -> Iterator[Row]:
    """`devices`: the device of the first rank of the prefill worker and of the decode worker. If
    `is_shared`, all ranks of a worker use that device, else each further rank the next card."""
    expected, _ = _answers(folder, devices, None, load, is_shared)
    for pair in load.pairs:
        answers, lost = _answers(folder, devices, pair, load, is_shared)
        parted = [first_difference(*each) for each in zip(answers, expected, strict=True)]
        differing = [f"prompt {i} from token {at}" for i, at in enumerate(parted) if at is not None]
        same, name = len(expected) - len(differing), " to ".join(map(_name, pair))
        goal = f"= {len(expected)}"
        yield Row(
            part, f"{name}: equal to one worker's", same, "prompts", goal, ", ".join(differing)
        )
        yield Row(part, f"{name}: sent and not arrived", lost, "blocks", "0")


def devices_of_workers(num_cards: int) -> tuple[str, str]:
    """Where the ranks of the two workers begin: on cards of their own, if there are enough."""
    return "cuda:0", "cuda:2" if num_cards >= 4 else "cuda:0"


def _answers(
    folder: Path,
    devices: tuple[str, str],
    pair: tuple[Layout, Layout] | None,
    load: ExchangeLoad,
    is_shared: bool,
) -> tuple[list[list[int]], int]:
    """The tokens after each prompt, and how many blocks were sent that did not arrive; by a decode
    worker alone if `pair` is None. Raises BatonError if no block was sent."""
    layouts = pair or (ONE, ONE)
    config = FleetConfig(
        str(folder),
        num_prefill=int(pair is not None),
        worker_flags=(
            "--dtype=float32",
            "--attention=torch",
            "--cuda-graphs=off",
            "--transport=nixl",
            "--chunk-max-tokens=128",
            f"--num-blocks={load.num_blocks}",
        ),
        role_flags={
            role: (f"--device={device}", f"--tensor-parallel={size}", f"--pipeline-parallel={num}")
            for role, device, (size, num) in zip(
                ("prefill", "decode"), devices, layouts, strict=True
            )
        },
        router_flags=("--local-prefill-threshold-tokens=0",) if pair else (),
        worker_module=worker_apart.__name__ if is_shared else FleetConfig.worker_module,
    )
    vocab_size = load_model_config(folder).vocab_size
    prompts = [
        [(7 * number + 3 * place) % vocab_size for place in range(length)]
        for number, length in enumerate(load.prompts)
    ]
    with BenchFleet(config) as fleet:
        url = fleet.url("router-1")
        answers = [complete(url, folder.name, each, load.num_output) for each in prompts]
        lost = _lost_blocks(fleet) if pair else 0
    return [each["choices"][0]["token_ids"] for each in answers], lost


def _lost_blocks(fleet: BenchFleet) -> int:
    """The blocks that were sent and have not arrived, once the counts of both workers agree or have
    had time to. Raises BatonError."""
    deadline = time.monotonic() + _COUNTS_S
    while True:
        workers = fleet.workers("router-1")
        sent = workers["prefill-1"]["counters"].get("blocks_sent", 0)
        received = workers["decode-1"]["counters"].get("blocks_received", 0)
        if sent == received > 0:
            return 0
        if time.monotonic() > deadline:
            if not sent:
                raise BatonError("no prompt was handed over")
            return int(sent - received)
        time.sleep(_POLL_S)


def _name(layout: Layout) -> str:
    size, num_stages = layout
    return f"{size} x {num_stages}"
