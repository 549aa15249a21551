"""A worker's hands: processes that compute its steps, and that leave nothing behind.

Each test but the first runs in a forked process, and its hand is forked as well.
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from typing import Self

import psutil
import pytest
import torch

from bench.tools.listeners import listeners_of
from engine.engine_config import EngineConfig
from engine.loader import LoadedEngine, load_engine
from engine.parallel.ranks import Step
from engine.parallel.sums import RankLost
from kv_transfer.transports.memory_file import SharedMemory
from scheduling.scheduler import SchedulerConfig
from tests.forked_tests import with_forked_hands
from tests.paths import DEMO_MODEL
from tests.sequences import greedy, sequence_of
from worker.ranks.head import Hands
from worker.ranks.processes import HandSettings

DEADLINE_S = 60.0
BLOCK = 16
PROMPT = tuple(range(40, 77))
CONFIG = EngineConfig(
    DEMO_MODEL,
    SchedulerConfig(block_size=BLOCK, max_batch_size=4, chunk_min_tokens=16, chunk_max_tokens=16),
    dtype="float32",
    device="cpu",
    num_blocks=32,
)


class Group:
    """Two ranks of the demo model, in one stage or in two. `told` are the reasons that the head got
    for the loss of its hand. At the end of a `with` block, the hand must be gone."""

    def __init__(
        self,
        num_stages: int = 1,
        silence_s: float = DEADLINE_S,
        config: EngineConfig = CONFIG,
        loading_s: float = DEADLINE_S,
        devices: tuple[str, ...] = (),
        transport: str = "",
    ) -> None:
        self.config = config
        self.told: list[str] = []
        self.was_told = threading.Event()
        size = 2 // num_stages
        common = config, size, 1, "warning", "text", "test", num_stages
        settings = HandSettings(*common, devices=devices, transport=transport)
        self.hands = Hands(settings, self._note, silence_s, loading_s)
        (self.hand,) = hands()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.hands.close()
        assert hands() == []

    def _note(self, reason: str) -> None:
        self.told.append(reason)
        self.was_told.set()

    def load(self) -> LoadedEngine:
        def allocate(num_bytes: int) -> memoryview:
            return self.hands.allocate(num_bytes, lambda size: None)

        return load_engine(self.config, time.monotonic, allocate, ranks=self.hands.ranks)


def hands() -> list[psutil.Process]:
    """The running hands that this process has started or forked."""
    me = psutil.Process()
    ways = [(each, each.cmdline()) for each in me.children()]
    return [each for each, way in ways if "worker.ranks.hand" in way or way == me.cmdline()]


def generate(loaded: LoadedEngine, num_tokens: int = 12) -> list[int]:
    sequence = sequence_of(PROMPT, greedy(num_tokens), BLOCK)
    loaded.engine.scheduler.add(sequence)
    while loaded.engine.scheduler.has_work:
        loaded.engine.run(loaded.engine.plan())
    return sequence.tokens[len(PROMPT) :]


def test_a_started_hand_computes_what_one_rank_computes() -> None:
    assert_equal_to_one_rank(num_stages=1)


@with_forked_hands(1)
def test_stages_compute_what_one_rank_computes() -> None:
    assert_equal_to_one_rank(num_stages=2)


def assert_equal_to_one_rank(num_stages: int) -> None:
    expected = generate(load_engine(CONFIG, time.monotonic))
    with Group(num_stages) as group:
        loaded = group.load()
        assert generate(loaded) == expected
        (other,) = loaded.pool.others
        assert other.tensor.any(), "the hand writes into memory that the head has, too"
        assert listeners_of(group.hand.pid) == [], "nobody but the head can talk to it"
        group.hands.close()
        assert not group.hand.is_running()
        assert group.told == []


@with_forked_hands(1)
def test_stages_give_the_bits_of_one_rank() -> None:
    """In bf16 a stage of one rank runs its layers in one call, as a whole model does."""
    config = replace(CONFIG, dtype="bfloat16", kv_order="pairs")
    alone = load_engine(config, time.monotonic)
    expected = generate(alone)
    with Group(2, config=config) as group:
        loaded = group.load()
        assert generate(loaded) == expected
        (first,) = loaded.pool.others
        assert torch.equal(torch.cat((first.tensor, loaded.pool.tensor), dim=1), alone.pool.tensor)


@pytest.mark.parametrize("num_stages", [1, 2])
@with_forked_hands(1)
def test_a_hand_that_is_killed_is_told_and_ends_the_step(num_stages: int) -> None:
    with Group(num_stages) as group:
        loaded = group.load()
        generate(loaded, 1)
        group.hand.kill()
        assert group.was_told.wait(DEADLINE_S)
        assert group.told == ["rank 1 of 2 has ended by signal 9"]
        with pytest.raises(RankLost):
            generate(loaded, 1)


@pytest.mark.parametrize(("num_stages", "who"), [(1, "rank 1"), (2, "the stage before")])
@with_forked_hands(1)
def test_a_hand_that_stands_still_fails_the_step_that_waits_for_it(
    num_stages: int, who: str
) -> None:
    with Group(num_stages, silence_s=1.0) as group:
        loaded = group.load()
        group.hand.send_signal(signal.SIGSTOP)
        with pytest.raises(RankLost, match=f"{who} has not answered for 1 s"):
            generate(loaded, 1)
        group.hand.kill()  # or the end would wait for it


@with_forked_hands(1)
def test_a_hand_that_ends_while_it_loads_leaves_the_word_to_the_head() -> None:
    """Whose own error, of the same checkpoint, says more than the end of a process."""
    with Group() as group:
        group.hand.kill()
        with pytest.raises(RankLost, match="gone") as lost:
            group.load()
        assert group.told == []
        explained = group.hands.explained(lost.value)
        assert str(explained) == "rank 1 of 2 has ended by signal 9"


@with_forked_hands(1)
def test_a_hand_that_the_kernel_kills_for_lack_of_memory() -> None:
    kills = iter([3, 4])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.ranks.processes.oom_kills", lambda: next(kills))
        with Group() as group:
            group.load()
            group.hand.kill()
            assert group.was_told.wait(DEADLINE_S)
            assert group.told == ["rank 1 of 2 has ended by signal 9: memory ran out"]


@pytest.mark.nightly
@with_forked_hands(1)
def test_a_hand_that_stands_still_while_it_loads_fails_the_start() -> None:
    with Group(loading_s=1.0) as group:
        group.hand.send_signal(signal.SIGSTOP)
        with pytest.raises(RankLost, match="rank 1 has not loaded within 1 s"):
            group.load()


@pytest.mark.nightly
@with_forked_hands(1)
def test_a_hand_that_reads_no_more_steps_fails_the_next_one() -> None:
    """Announcements that do not fit into the socket wait for as long as a sum does."""
    with Group(silence_s=1.0) as group:
        group.load()
        group.hand.send_signal(signal.SIGSTOP)
        with pytest.raises(RankLost, match="rank 1 takes no more steps"):
            group.hands.ranks.announce(Step([1] * (1 << 20), []))


@with_forked_hands(1)
def test_memory_of_a_transport_is_shared_with_the_hands() -> None:
    with Group() as group:
        memories: list[SharedMemory] = []

        def by_transport(num_bytes: int) -> SharedMemory:
            memories.append(SharedMemory(num_bytes))
            return memories[-1]

        def allocate(num_bytes: int) -> memoryview:
            return group.hands.allocate(num_bytes, by_transport)

        loaded = load_engine(CONFIG, time.monotonic, allocate, ranks=group.hands.ranks)
        generate(loaded, 1)
        half = len(memories[0].view) // 2
        assert any(memories[0].view[:half])
        assert any(memories[0].view[half:])
        memories[0].close()
