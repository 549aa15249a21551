"""Workers over the doctor's window: means of their load, growth of their counters.

Owns slots of `SLOT_US` for each worker; one sample per second goes into the newest. A restarted
worker starts with empty slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from console.doctor.observation import WINDOW_S, StepModelFacts, WorkerFacts
from router.fleet.worker import Worker

SLOT_US = 10_000_000
_LATE_SLOTS = 3
"""The newest slots, which say how a worker does now."""
_COUNTERS = ("steps", "step_us", "prefill_tokens", "decode_tokens", "preemptions")


@dataclass
class _Slot:
    """Sums of samples, and the counters and the ranks' times at the slot's first one."""

    start_us: int
    counters: dict[str, int]
    rank_busy_us: tuple[int, ...] = ()
    samples: int = 0
    waiting: float = 0.0
    running: float = 0.0
    used: float = 0.0
    model: StepModelFacts | None = None


@dataclass
class _Track:
    incarnation: str
    joined_us: int
    last: dict[str, int] = field(default_factory=dict)
    rank_busy_us: tuple[int, ...] = ()
    slots: deque[_Slot] = field(default_factory=deque)


class WorkerWindow:
    """The samples of the last `WINDOW_S` seconds by worker."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}
        self._begun_us = 0

    def sample(self, workers: Iterable[Worker], now_us: int) -> None:
        """Take a sample of each worker that has reported its load."""
        self._begun_us = self._begun_us or now_us
        present = {each.worker_id: each for each in workers}
        for gone in self._tracks.keys() - present.keys():
            del self._tracks[gone]
        for worker in present.values():
            if worker.stats is not None:
                self._add(worker, now_us)

    def facts(
        self, worker: Worker, hits: tuple[int, int], losses: int, mean_prompt: float
    ) -> WorkerFacts:
        """A worker's means. `hits` are its prompt tokens from the cache and in total. `mean_prompt`
        is the length of a prompt, for estimating the work of a prefill step."""
        info, track = worker.info, self._tracks.get(worker.worker_id)
        plain = WorkerFacts(
            worker_id=worker.worker_id,
            role=worker.role,
            state=info.state.value,
            max_batch_size=info.max_batch_size or None,
            blocks_total=info.num_blocks,
            losses=losses,
        )
        if track is None or worker.stats is None:
            return plain
        slots, first = track.slots, track.slots[0]
        grown = {name: track.last[name] - first.counters[name] for name in track.last}
        samples = sum(each.samples for each in slots)
        used = sum(each.used for each in slots) / samples
        steps = grown["steps"]
        tokens = grown["prefill_tokens"] + grown["decode_tokens"]
        is_decode = grown["decode_tokens"] > 0
        context = used * info.block_size if is_decode else tokens / max(1, steps) * mean_prompt / 2
        seconds = max(1.0, samples)  # one sample per second
        per_step = tokens / steps if steps else 0.0
        late = list(slots)[-_LATE_SLOTS:]
        return WorkerFacts(
            worker_id=worker.worker_id,
            role=worker.role,
            state=info.state.value,
            joined_us=track.joined_us,
            num_waiting=sum(each.waiting for each in slots) / samples,
            num_running=sum(each.running for each in slots) / samples,
            max_batch_size=info.max_batch_size or None,
            blocks_total=info.num_blocks,
            blocks_used=used,
            num_steps=steps,
            step_ms=grown["step_us"] / steps / 1000 if steps else None,
            step_tokens=per_step if steps else None,
            step_attended=context if steps else None,
            step_model=_usual_model(slots, per_step, context),
            late_steps=track.last["steps"] - late[0].counters["steps"],
            late_model=_ordered_models(late, per_step, context)[0] if _is_full(late) else None,
            hit_rate=hits[0] / hits[1] if hits[1] else None,
            prompt_tokens=hits[1],
            evictions_per_s=grown["evicted"] / seconds,
            preemptions=grown["preemptions"],
            losses=losses,
            tensor_parallel=info.tensor_parallel,
            rank_busy_us=tuple(
                now - then
                for now, then in zip(track.rank_busy_us, first.rank_busy_us, strict=False)
            ),
        )

    def _add(self, worker: Worker, now_us: int) -> None:
        stats, info = worker.stats, worker.info
        assert stats is not None
        track = self._tracks.get(worker.worker_id)
        if track is None or track.incarnation != info.incarnation:
            is_older = now_us - self._begun_us < SLOT_US  # the worker may be older than this router
            track = _Track(info.incarnation, 0 if is_older else now_us)
            self._tracks[worker.worker_id] = track
        counters = {name: stats.counters.get(name, 0) for name in _COUNTERS}
        counters["evicted"] = worker.evicted_blocks
        track.last, track.rank_busy_us = counters, stats.rank_busy_us
        if not track.slots or now_us >= track.slots[-1].start_us + SLOT_US:
            track.slots.append(_Slot(now_us, counters, stats.rank_busy_us))
            while track.slots[0].start_us < now_us - WINDOW_S * 1e6:
                track.slots.popleft()
        slot = track.slots[-1]
        slot.samples += 1
        slot.waiting += stats.num_waiting
        slot.running += stats.num_running
        slot.used += stats.blocks_used
        slot.model = StepModelFacts(
            fixed_us=stats.step_fixed_us,
            per_token_us=stats.step_per_token_us,
            per_attended_us=stats.step_per_attended_us,
        )


def _usual_model(slots: Iterable[_Slot], tokens: float, attended: float) -> StepModelFacts | None:
    """Of the step models that a worker had in the window, the one with the median prediction for
    its mean step. A single model may be off, because a fit strays for a while when all steps are
    alike."""
    models = _ordered_models(slots, tokens, attended)
    return models[len(models) // 2] if models else None


def _is_full(late: Sequence[_Slot]) -> bool:
    """Whether the newest slots are all there, each with a model."""
    return len(late) == _LATE_SLOTS and all(each.model is not None for each in late)


def _ordered_models(slots: Iterable[_Slot], tokens: float, attended: float) -> list[StepModelFacts]:
    """The step models that a worker had in these slots, in order of their predictions for such a
    step."""
    models = [each.model for each in slots if each.model is not None]
    return sorted(models, key=lambda each: each.predict_ms(tokens, attended))
