"""One simulated worker of either role: the real scheduler, blocks and handoffs; only steps are
predicted.

Like the loop of a worker, it handles messages when the step under way ends, plans a step, and
delivers what the step gave. Steps that only decode are leapt over (`simulator.leaps`) until
something happens that the next plan depends on; then the leap ends with the step under way.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, cast

from kv_transfer.handoff.key import HandoffKey
from scheduling.batch import Batch
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence, SequenceState
from scheduling.step_model import StepCost
from simulator.decode_run import DecodeRun
from simulator.devices.step_times import chunk_work
from simulator.event_queue import Action, EventQueue
from simulator.handoffs import Handoffs
from simulator.leaps import advance, longest_leap, plan_next
from simulator.network import Network
from simulator.requests import Request
from simulator.sequences import SimulatedSequence, simulated_sequence
from simulator.usage import Usage
from simulator.worker_spec import WorkerSpec
from worker.moved_blocks import moved_blocks

_NOTHING = Batch()


class Listener(Protocol):
    """The router, as a worker sees it. Messages reach the router at once; the router adds their
    delay."""

    def on_first_token(self, request: Request, time: float) -> None: ...
    def on_moved(self, request: Request, time: float) -> None: ...
    def on_end(self, request: Request, time: float) -> None: ...
    def on_change(self, worker: SimulatedWorker) -> None: ...


@dataclass(slots=True)
class Task:
    """A request on one worker. `num_ready` blocks of its prompt were offered to its sink, in
    `num_chunks` chunks."""

    request: Request
    sequence: SimulatedSequence
    has_token: bool = False
    has_blocks: bool = False
    num_ready: int = 0
    num_chunks: int = 0


class SimulatedWorker:
    """One worker; events call its methods."""

    def __init__(
        self,
        number: int,
        spec: WorkerSpec,
        queue: EventQueue,
        network: Network,
        listener: Listener,
        message_s: float,
    ) -> None:
        self.number = number
        self.name = f"{spec.role.value}-{number}"
        self.spec = spec
        self.bytes_by_group: Seq[float] = spec.bytes_by_group
        self.scheduler = Scheduler(spec.config, spec.pools(), spec.step_model())
        self.windows: Seq[int | None] = [rule.window for rule in self.scheduler.pools.rules]
        self.handoffs = Handoffs(self, queue, network, message_s)
        self.usage = Usage()
        self.received: dict[str, int] = {}
        self.neighbours: Seq[SimulatedWorker] = ()
        """The other workers of its host."""
        self.rng = random.Random(number)
        self._queue = queue
        self._listener = listener
        self._tasks: dict[str, Task] = {}
        self.is_busy = False
        """Whether a step is under way."""
        self._has_changed = self._has_woken = False
        self._learnt_rows = -1
        self._step_ends = 0.0  # the end of a step with chunks
        self._run: DecodeRun | None = None

    @property
    def num_tasks(self) -> int:
        """Requests that are here."""
        return len(self._tasks)

    # -- messages ---------------------------------------------------------------------------

    def deliver(self, handler: Action, *arguments: Any) -> None:
        """Handle a message when the step under way ends."""
        if not self.is_busy:
            handler(*arguments)
        elif self._run is None:
            self._queue.at(self._step_ends, handler, *arguments)
        else:
            decodes = self._run
            ends = decodes.end(decodes.num_over(self._queue.now))
            self._queue.at(ends, handler, *arguments)

    def _wake(self) -> None:
        """Plan again when the step under way ends, or now if there is none, because the next plan
        may differ."""
        if not self.is_busy:
            self.is_busy = True
            self._step_ends = self._queue.now
            self._queue.step_end(self._queue.now, self.number, self._turn)
            return
        self._has_woken = True
        if self._run is not None:
            self._cut(self._run)

    def generate(self, request: Request) -> None:
        """Generate tokens; if the request has a prefill worker, ask that for the prompt."""
        sequence = self._open(request)
        sequence.remote = request.prefill is not None
        self.scheduler.add(sequence)
        if request.prefill is not None:
            self.handoffs.ask(request.key, request.prefill)
        else:
            self._wake()

    def prefill(self, request: Request) -> None:
        """Compute a prompt for the request's decode worker."""
        sequence = self._open(request)
        sequence.prefill_only, sequence.target = True, request.decode
        self.scheduler.add(sequence)
        self.handoffs.open(request.key, sequence.blocks_for(sequence.num_tokens))
        self._wake()

    def _open(self, request: Request) -> SimulatedSequence:
        self.received[request.router] = self.received.get(request.router, 0) + 1
        sequence = simulated_sequence(
            request.key.request_id,
            request.num_prompt,
            request.num_output,
            request.content,
            self.spec.config.block_size,
            request.arrival,
        )
        sequence.share, sequence.priority = request.share, request.priority
        sequence.session = request.session
        self._tasks[sequence.request_id] = Task(request, sequence)
        return sequence

    # -- handoffs: see `HandoffOwner` ---------------------------------------------------------

    def on_begun(self, key: HandoffKey) -> None:
        """See `HandoffOwner`."""
        if key.request_id in self._tasks:
            self._tasks[key.request_id].sequence.source_has_begun = True
            self._wake()

    def on_complete(self, key: HandoffKey) -> None:
        """See `HandoffOwner`."""
        task = self._tasks[key.request_id]
        task.has_blocks = True
        self._try_join(task)

    def on_first_token(self, key: HandoffKey) -> None:
        """See `HandoffOwner`. A token that completes the output needs no blocks."""
        task = self._tasks[key.request_id]
        task.has_token = True
        is_waiting = task.sequence.state is SequenceState.WAITING
        if is_waiting and task.request.num_output == 1:
            self.handoffs.abort(key)
            self.scheduler.completed(task.sequence, 0, self._queue.now)
            self._end(task.sequence)
            self._wake()
        else:
            self._try_join(task)

    def on_granted(self, key: HandoffKey, num_bytes: float) -> None:
        """See `HandoffOwner`."""
        task = self._tasks.get(key.request_id)
        if task is not None:
            task.request.sent_bytes += num_bytes
            self.scheduler.shares.release(task.sequence)
            if self.scheduler.num_waiting:
                self._wake()

    def on_written(self, key: HandoffKey, num_blocks: int, began: float, ended: float) -> None:
        """See `HandoffOwner`."""
        request = self._tasks[key.request_id].request
        request.sent_blocks += num_blocks
        request.write_s += ended - max(began, request.write_ended)
        request.write_ended = ended

    def on_released(self, key: HandoffKey) -> None:
        """See `HandoffOwner`."""
        task = self._tasks.pop(key.request_id)
        self.scheduler.release_blocks(task.sequence)
        self._listener.on_moved(task.request, self._queue.now)
        if self.scheduler.num_waiting:
            self._wake()
        elif not self.is_busy:
            self._listener.on_change(self)

    def _try_join(self, task: Task) -> None:
        if not (task.has_token and task.has_blocks):
            return
        task.request.exposed_s = self._queue.now - task.request.prompt_done
        self._catch_up()
        produced = self.scheduler.arrived(task.sequence, 0, self._queue.now)
        self._has_changed = True
        self._wake()
        if produced.finish is not None:
            self._end(task.sequence)

    # -- the loop: a turn, the steps that it begins, and their ends ---------------------------

    def _turn(self, run: DecodeRun | None = None) -> None:
        """Plan a step, and begin it. `run` has just been leapt over; it goes on if nothing has
        happened."""
        goes_on = run is not None and not (self._has_woken or self._has_changed)
        goes_on = goes_on and not self.spec.is_stepwise
        self._has_woken = False
        batch = _NOTHING
        if self.scheduler.has_work:
            batch = self.scheduler.schedule(self._queue.now)
            self._begin(batch)
        self.is_busy = not batch.is_empty
        if batch.chunks:
            self._compute(batch)
        elif goes_on and run is not None and batch.decodes == run.batch.decodes:
            run.batch = batch
            self._leap(run)
        elif batch.decodes:
            self._decode(batch)
        if batch.chunks or batch.preempted or self._has_changed:
            self._has_changed = False
            self._listener.on_change(self)
        has_joined, self._has_woken = self._has_woken, False
        if has_joined and not self.is_busy:  # a request that lacked no block
            self._wake()

    def _begin(self, batch: Batch) -> None:
        """Grant blocks to the sources of admitted sequences, and tell sinks of begun prompts."""
        for sequence in batch.preempted:
            self.usage.num_preemptions += 1
            self._tasks[sequence.request_id].request.num_preemptions += 1
        for sequence in batch.received:
            first = sequence.num_cached // sequence.block_size
            blocks = [
                moved_blocks(sequence, group, sequence.num_tokens, first)
                for group in range(len(self.windows))
            ]
            self.handoffs.offer(HandoffKey(*sequence.key), blocks)
        for chunk in batch.chunks:
            task = self._tasks[chunk.sequence.request_id]
            if task.num_chunks == 0 and not task.has_token:
                task.request.cached_tokens = chunk.sequence.num_cached
                if chunk.sequence.prefill_only:
                    self.handoffs.begin(task.request.key)
                    self._offer(task, chunk.start // chunk.sequence.block_size)

    def _compute(self, batch: Batch) -> None:
        """Begin a step with prompt chunks."""
        rows, context = len(batch.decodes), sum([each.num_tokens for each in batch.decodes])
        now, work = self._queue.now, chunk_work(batch, self.spec.windows)
        seconds = self._noisy(True, self.spec.times.seconds(rows, context, work))
        self._step_ends = ends = now + seconds
        self._queue.step_end(ends, self.number, self._end_step, batch, batch.cost, seconds)

    def _end_step(self, batch: Batch, cost: StepCost, seconds: float) -> None:
        produced = self.scheduler.commit(batch, [0] * len(batch.sampled), self._queue.now)
        self.spec.teach(self.scheduler.model, cost, seconds)
        self._learnt_rows = -1
        self._has_changed = True
        self.usage.num_steps += 1
        self.usage.prefill_s += seconds
        self.usage.prefill_tokens += batch.num_chunk_tokens
        if batch.decodes:
            self.usage.decode_tokens += len(batch.decodes)
            self.usage.note_gap(seconds, len(batch.decodes))
        for chunk in batch.chunks:
            task = self._tasks[chunk.sequence.request_id]
            if chunk.sequence.prefill_only:
                whole = (chunk.start + chunk.num_tokens) // chunk.sequence.block_size
                num_prompt = chunk.sequence.blocks_for(task.request.num_prompt)
                self._offer(task, num_prompt if chunk.completes else whole, chunk.completes)
            task.num_chunks += 1
        for each in produced:
            if each.index == 0:
                self._deliver_first(self._tasks[each.sequence.request_id])
            if each.finish is not None and not each.sequence.prefill_only:
                self._end(each.sequence)
        self._turn()

    def _deliver_first(self, task: Task) -> None:
        """Send the first token of a computed prompt to the router, and to the sink if there is
        one."""
        task.request.prompt_done = self._queue.now
        self._listener.on_first_token(task.request, self._queue.now)
        if task.sequence.prefill_only:
            self.handoffs.finish(task.request.key)

    def _offer(self, task: Task, num_ready: int, is_last: bool = False) -> None:
        """Offer the blocks that have become ready; those of groups with a window at the end."""
        first, task.num_ready = task.num_ready, num_ready
        if num_ready == first:
            return
        num_tokens = num_ready * task.sequence.block_size
        for group, window in enumerate(self.windows):
            if window is None or is_last:
                start = 0 if window is not None else first
                blocks = moved_blocks(task.sequence, group, num_tokens, start)
                self.handoffs.ready(task.request.key, blocks, task.num_chunks)

    def _noisy(self, has_chunks: bool, seconds: float) -> float:
        """The time of a step that begins now and was predicted to take `seconds`."""
        if self.spec.noise is None:
            return seconds
        others = sum(each.is_busy for each in self.neighbours)
        return seconds * self.spec.noise.draw(has_chunks, seconds, others, self.rng)

    def _decode(self, batch: Batch) -> None:
        """Begin a run of steps, of which as many are leapt over as can follow each other."""
        rows, now = len(batch.decodes), self._queue.now
        context = sum([len(each.tokens) for each in batch.decodes])
        fixed, slope = self.spec.times.decode_line(rows)
        seconds = fixed + slope * context
        fixed += self._noisy(False, seconds) - seconds
        learns = rows != self._learnt_rows or self.spec.learns_every_step
        self._leap(DecodeRun(batch, now, rows, context, fixed, slope, learns))

    def _leap(self, run: DecodeRun) -> None:
        most, decodes = self.spec.most_steps, cast("list[SimulatedSequence]", run.batch.decodes)
        run.num_planned = 1 if most == 1 else min(longest_leap(self.scheduler, decodes), most)
        self._run = run
        self._expect_end(run)

    def _expect_end(self, run: DecodeRun) -> None:
        over = run.num_done + run.num_planned
        self._queue.step_end(run.end(over), self.number, self._end_leap, run, over)

    def _cut(self, run: DecodeRun) -> None:
        """End the leap with the step under way, because something has happened."""
        num_planned = run.num_over(self._queue.now) - run.num_done
        if num_planned < run.num_planned:
            run.num_planned = num_planned
            self._expect_end(run)

    def _end_leap(self, run: DecodeRun, over: int) -> None:
        if run is not self._run or over != run.num_done + run.num_planned:
            return  # it was cut
        finished = self._decode_steps(run, run.num_planned)
        self._run = None
        for sequence in finished:
            self._end(sequence)
        self._turn(run)

    def _decode_steps(self, run: DecodeRun, num_steps: int) -> list[Sequence]:
        """Decode the next steps of a run; returns the sequences that have finished."""
        decodes, over = cast("list[SimulatedSequence]", run.batch.decodes), run.num_done + num_steps
        if run.learns and not run.num_done:
            cost, took_s = StepCost(run.rows, run.context), run.end(1) - run.begun
            self.spec.teach(self.scheduler.model, cost, took_s)
            self._learnt_rows = run.rows
        took_s, num_tokens = run.end(over) - run.end(run.num_done), num_steps * run.rows
        self.usage.decode_s += took_s
        self.usage.num_steps += num_steps
        self.usage.decode_tokens += num_tokens
        self.usage.note_gap(took_s / num_steps, num_tokens)
        run.num_done, run.num_planned = over, run.num_planned - num_steps
        ended = run.end(over)
        if self.spec.most_steps > 1:
            return list(advance(self.scheduler, decodes, num_steps, ended))
        produced = self.scheduler.commit(run.batch, [0] * run.rows, ended)
        return [each.sequence for each in produced if each.finish is not None]

    def _catch_up(self) -> None:
        """Do to blocks what the steps have done that were leapt over, before something else changes
        blocks at the end of a step. The order matters only if there are windows."""
        run = self._run
        if run is None or not self.scheduler.pools.has_windows:
            return
        num_steps = run.num_over(self._queue.now) - run.num_done - 1
        if num_steps:
            self._decode_steps(run, num_steps)
            plan_next(self.scheduler, cast("list[SimulatedSequence]", run.batch.decodes))

    def _end(self, sequence: Sequence) -> None:
        """End a request, which has its last token."""
        self._has_changed = True
        task = self._tasks.pop(sequence.request_id)
        self._listener.on_end(task.request, self._queue.now)
