"""How much of a worker's messages a link takes in one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from protocol.control_message import ControlMessage
from protocol.messages import (
    AttemptFailed,
    SequenceTokens,
    StepTokens,
)
from protocol.sampling import TokenLogprobs
from router.fleet.frame_socket import MAX_AT_ONCE
from router.fleet.step_parts import LOGPROBS_WORK, PART_WORK, in_parts
from router.fleet.worker import Loss, Worker
from tests.unit.router.router_harness import Harness, until


async def test_the_last_words_of_a_worker_leave_others_their_turns(harness: Harness) -> None:
    """However many they are: the end of a session is no reason to stop everything else."""
    (worker,) = await harness.join("d1")
    listener = TurnCounter()
    harness.fleet.listen(listener)
    word = AttemptFailed(request_id="r", attempt=1, worker_id="d1", reason="", retryable=True)
    for _ in range(3000):
        worker.send(word)
    worker.control.close(linger=60_000)
    counting = asyncio.create_task(listener.count_turns())
    await until(lambda: listener.is_lost)
    counting.cancel()
    assert listener.taken.total() == 3000
    assert max(listener.taken.values()) <= 2 * MAX_AT_ONCE


async def test_a_worker_that_is_far_ahead_leaves_others_their_turns(harness: Harness) -> None:
    (worker,) = await harness.join("d1")
    listener = TurnCounter()
    harness.fleet.listen(listener)
    counting = asyncio.create_task(listener.count_turns())
    word = AttemptFailed(request_id="r", attempt=1, worker_id="d1", reason="", retryable=True)
    for _ in range(3000):
        worker.send(word)
    await until(lambda: listener.taken.total() == 3000)
    counting.cancel()
    assert max(listener.taken.values()) < 1000


class TurnCounter:
    """Notes how many messages are taken in each turn of the event loop."""

    def __init__(self) -> None:
        self.taken: Counter[int] = Counter()
        self.is_lost = False
        self._turn = 0

    async def count_turns(self) -> None:
        while True:
            self._turn += 1
            await asyncio.sleep(0)

    def on_message(self, worker: Worker, message: ControlMessage) -> None:
        self.taken[self._turn] += 1

    def on_lost(self, worker: Worker, reason: str, loss: Loss) -> int:
        self.is_lost = True
        return 0

    def on_fleet(self) -> None:
        pass


def tokens_of(number: int, num_tokens: int, has_logprobs: bool) -> SequenceTokens:
    logprobs = [TokenLogprobs(-1.0)] * num_tokens if has_logprobs else None
    return SequenceTokens(
        request_id=f"r{number}", attempt=1, index=0, token_ids=[1] * num_tokens, logprobs=logprobs
    )


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_a_step_s_tokens_are_taken_in_parts_of_little_work(has_logprobs: bool) -> None:
    work = LOGPROBS_WORK if has_logprobs else 1
    sizes = [1] * 200 + [PART_WORK] * 3 + [5]  # the last part has one sequence
    sequences = [tokens_of(i, size, has_logprobs) for i, size in enumerate(sizes)]
    parts = [each.sequences for each in in_parts(StepTokens(sequences=sequences))]
    assert [sequence for part in parts for sequence in part] == sequences
    for part in parts:
        before_last = sum(len(each.token_ids) for each in part[:-1]) * work
        assert before_last < PART_WORK, "no part goes on once it has enough"
    assert len(parts) >= sum(sizes) * work // (PART_WORK + max(sizes) * work)


async def test_a_large_step_is_taken_whole_and_before_what_follows(harness: Harness) -> None:
    (worker,) = await harness.join("d1")
    taken: list[str] = []
    harness.fleet.listen(StepReader(taken))
    names = [f"r{number}" for number in range(300)]
    worker.send(StepTokens(sequences=[tokens_of(number, 1, True) for number in range(300)]))
    worker.send(
        AttemptFailed(request_id="last", attempt=1, worker_id="d1", reason="", retryable=True)
    )
    await until(lambda: "last" in taken)
    assert taken == [*names, "last"]


class StepReader(TurnCounter):
    """Notes the requests that messages name, in order."""

    def __init__(self, taken: list[str]) -> None:
        super().__init__()
        self._names = taken

    def on_message(self, worker: Worker, message: ControlMessage) -> None:
        if isinstance(message, StepTokens):
            self._names += [each.request_id for each in message.sequences]
        else:
            assert isinstance(message, AttemptFailed)
            self._names.append(message.request_id)
