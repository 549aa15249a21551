"""The runner that computes a model: a batch's tokens in, sampled tokens out.

Turns the scheduler's batch into tensors; does not know why these sequences were scheduled.
Rows are in the batch's order: decodes, then chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import AttentionBackend, Segment, wanted_rows
from engine.backend import CapturedDecodes
from engine.device import fence_of, wait_for
from engine.fences import PASSED, Fence
from engine.models.runnable import Likeliest, RunnableModel, WholeStep
from engine.packed_copy import on_device
from engine.runner import (
    LATE,
    NOT_FINITE,
    NOTHING_LEFT,
    TOO_SLOW,
    Row,
    RowFailure,
    SampledToken,
)
from engine.sampling.chosen_tokens import Choices, LateTokens, read_tokens
from engine.sampling.grammar import Grammars
from engine.sampling.grammar_matcher import GrammarMatcher, TokenMask
from engine.sampling.prompt_logprobs import record_chunk
from engine.sampling.sample_row import SampleRow
from engine.sampling.sampler import InvalidLogits, Sampler
from engine.sampling.token_history import TokenHistory, mask_of, words_ends
from protocol.errors import GRAMMAR_FAILED
from scheduling.batch import Batch
from scheduling.sequence import Sequence


@dataclass(frozen=True)
class Chosen:
    """The choices of a launched step: `ids` [R] on the device; `rows`, the row of each sampled
    sequence; and host copies, which may be read once the device has passed `fence`. The step's keys
    and values are in the pool once it has passed `stored`, which comes before the sampling."""

    rows: Mapping[Sequence, int]
    ids: torch.Tensor
    stored: Fence
    fence: Fence
    copies: Choices

    def read(self) -> list[Row]:
        """See StepAhead."""
        self.fence.wait()
        tokens = read_tokens(self.copies.ids, self.copies.logprobs)
        verdicts = zip(self.copies.is_chosen.tolist(), self.copies.is_finite.tolist(), strict=True)
        return [
            token if is_chosen else NOTHING_LEFT if is_finite else NOT_FINITE
            for token, (is_chosen, is_finite) in zip(tokens, verdicts, strict=True)
        ]


Launched = torch.Tensor | Likeliest
"""The sampled sequences' logits, [R, vocab_size] fp32, or their likeliest tokens."""


class ModelRunner:
    """The `Runner` of a model with its attention backend, sampler and grammars. `step`, if the
    machine has it, runs batches that need only the likeliest tokens."""

    def __init__(
        self,
        model: RunnableModel,
        attention: AttentionBackend,
        sampler: Sampler,
        grammars: Grammars,
        graphs: CapturedDecodes | None = None,
        step: WholeStep | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._grammars = grammars
        self._graphs = graphs
        self._step = step

    def launch(self, batch: Batch) -> tuple[Launched, Fence]:
        """Compute the batch's tokens. Returns the input of `sample` for `batch.sampled`, and the
        fence behind it; on a card the work may still be running."""
        if self._step is not None and _takes_likeliest(batch):
            inputs = _inputs(batch, None)
            self._attention.plan(inputs.segments)
            rows = wanted_rows(inputs.segments)
            return self._step(inputs.tokens, inputs.positions, rows), PASSED
        return self._compute(batch, _inputs(batch, None)), fence_of(self._model.device)

    def sample(self, batch: Batch, launched: Launched) -> list[Row]:
        """A token for each of `batch.sampled`, in order; waits for the device if there is one.

        A row from which no token can be chosen fails its own sequence only.
        """
        if isinstance(launched, Likeliest):
            ids = launched.finite_ids()
            return [NOT_FINITE if each is None else SampledToken(each) for each in ids]
        logits, sampled = launched, batch.sampled
        if not sampled:
            return []
        allowed, without = self._masks(sampled)
        vocab_size = logits.shape[-1]
        rows = [_sample_row(s, allowed.get(row), vocab_size) for row, s in enumerate(sampled)]
        return self._sample(logits, rows, without)

    def launch_ahead(self, batch: Batch, before: Chosen | None) -> Chosen:
        """Compute the batch's tokens and choose the next ones, without waiting for a card.

        `before` is the step under way, if any; tokens that the host does not know yet are taken
        from it, on the device. No sequence's sampling may need such a token, or a grammar's mask.
        """
        return self.run_planned(self.plan_ahead(batch, before))

    def plan_ahead(self, batch: Batch, before: Chosen | None) -> PlannedStep:
        """Like `launch_ahead`, but leaves computing and choosing to `run_planned`."""
        vocab_size = self._model.config.vocab_size
        rows = [_sample_row(sequence, None, vocab_size) for sequence in batch.sampled]
        return PlannedStep(batch, _inputs(batch, before), rows)

    def run_planned(self, step: PlannedStep) -> Chosen:
        """See `plan_ahead`. Planned steps run in their order."""
        logits = self._compute(step.batch, step.inputs)
        stored = fence_of(self._model.device)
        choices = self._sampler.choose(logits, step.rows)
        copies = choices.on_host()
        numbers = {sequence: row for row, sequence in enumerate(step.batch.sampled)}
        return Chosen(numbers, choices.ids, stored, fence_of(self._model.device), copies)

    def wait(self) -> None:
        """Wait until the device has finished its queued work."""
        wait_for(self._model.device)

    def _compute(self, batch: Batch, inputs: StepInputs) -> torch.Tensor:
        """The logits of `batch.sampled`, [R, vocab_size], fp32."""
        tokens, positions, late = inputs.tokens, inputs.positions, inputs.late
        graphs = self._graphs
        if graphs is not None and not batch.chunks and len(tokens) <= graphs.max_sequences:
            return graphs.logits(tokens, positions, inputs.segments, late)
        self._attention.plan(inputs.segments)
        wanted, sampled_rows = wanted_rows(inputs.segments), inputs.sampled_rows
        arrays = {"tokens": _numbers(tokens), "positions": _numbers(positions)}
        if wanted is not None:
            arrays["wanted"] = _numbers(wanted)
        num_wanted = len(tokens) if wanted is None else len(wanted)
        if len(sampled_rows) < num_wanted:
            arrays["sampled"] = _numbers(sampled_rows)
        if late is not None:
            arrays["late"] = late.index
        on = on_device(arrays, self._model.device)
        if late is not None:
            late.put(on["tokens"], on["late"])
        hidden = self._model.hidden(
            on["tokens"], on["positions"], self._attention, on.get("wanted")
        )
        self._record_prompts(batch, inputs.segments, hidden)
        if "sampled" in on:
            hidden = hidden.index_select(0, on["sampled"])
        return self._model.logits(hidden)

    def _record_prompts(self, batch: Batch, segments: list[Segment], hidden: torch.Tensor) -> None:
        """Record log-probabilities for the prompts that want them; `hidden` holds the batch's
        wanted rows."""
        row = num_decodes = len(batch.decodes)
        for chunk, segment in zip(batch.chunks, segments[num_decodes:], strict=True):
            end = row + segment.wanted_len
            if chunk.sequence.needs_prompt_logits:
                log_totals = self._sampler.log_totals
                record_chunk(self._model, hidden[row:end], chunk, log_totals=log_totals)
            row = end

    def _masks(self, sampled: list[Sequence]) -> tuple[dict[int, TokenMask], dict[int, Row]]:
        """Masks of the sequences with a grammar, by row; and the rows that get no token, because
        their grammar has failed or their mask is late."""
        allowed: dict[int, TokenMask] = {}
        without: dict[int, Row] = {}
        constrained = [
            (row, cast(GrammarMatcher, sequence.grammar))
            for row, sequence in enumerate(sampled)
            if sequence.grammar is not None
        ]
        if constrained:
            self._grammars.follower.wait_for_masks([matcher for _, matcher in constrained])
        for row, matcher in constrained:
            if matcher.time.is_spent:
                without[row] = TOO_SLOW
            elif matcher.is_pending:
                without[row] = LATE
            elif matcher.mask is None:
                reason = f"its grammar failed: {matcher.error}"
                without[row] = RowFailure(reason, code=GRAMMAR_FAILED)
            else:
                allowed[row] = matcher.mask
        return allowed, without

    def _sample(
        self, logits: torch.Tensor, rows: list[SampleRow], without: dict[int, Row]
    ) -> list[Row]:
        """A token, or the failure, for each row of `logits` [R, vocab_size], fp32. The rows
        `without` get none."""
        outcomes = {**without}
        while len(outcomes) < len(rows):  # at most two passes: the second one omits invalid rows
            left = [row for row in range(len(rows)) if row not in outcomes]
            part = logits
            if outcomes:
                part = logits[torch.tensor(left, dtype=torch.long, device=logits.device)]
            try:
                tokens = self._sampler.sample(part, [rows[row] for row in left])
                outcomes.update(zip(left, tokens, strict=True))
            except InvalidLogits as error:
                outcomes.update({left[row]: NOT_FINITE for row in error.rows})
                outcomes.update({left[row]: NOTHING_LEFT for row in error.forbidden_rows})
        return [outcomes[row] for row in range(len(rows))]


def _takes_likeliest(batch: Batch) -> bool:
    """Whether the step needs only the largest logits."""
    return all(sequence.takes_likeliest for sequence in batch.sampled) and not any(
        chunk.sequence.needs_prompt_logits for chunk in batch.chunks
    )


@dataclass
class StepInputs:
    """A batch as the model's input: N tokens, of which those in `late` are known to the device
    only. `sampled_rows` index the wanted rows."""

    segments: list[Segment]
    tokens: list[int]
    positions: list[int]
    sampled_rows: list[int]
    late: LateTokens | None = None


@dataclass(frozen=True)
class PlannedStep:
    """A batch, with a copy of everything that a step needs from its sequences."""

    batch: Batch
    inputs: StepInputs
    rows: list[SampleRow]


def _inputs(batch: Batch, before: Chosen | None) -> StepInputs:
    """The model's input for `batch`; unknown tokens come from the step under way, `before`."""
    inputs = StepInputs([], [], [], [])
    tokens = inputs.tokens
    places: list[int] = []
    rows: list[int] = []
    num_wanted = 0
    for sequence, start, size, gives_token in _spans(batch):
        wanted = size if sequence.needs_prompt_logits else int(gives_token)
        inputs.segments.append(_segment(sequence, start + size, size, wanted))
        num_wanted += wanted
        if before is not None and start == sequence.num_tokens:
            places.append(len(tokens))
            rows.append(before.rows[sequence])
            tokens.append(0)
        tokens += sequence.tokens[start : start + size]
        inputs.positions += range(start, start + size)
        if gives_token:
            inputs.sampled_rows.append(num_wanted - 1)
    if before is not None and places:
        inputs.late = LateTokens.of(places, rows, before.ids)
    return inputs


def _segment(sequence: Sequence, context_len: int, size: int, wanted: int) -> Segment:
    first, *others = sequence.tables
    if not others:
        return Segment(size, context_len, first.blocks, wanted, first.first)
    tables = tuple((table.first, table.blocks) for table in others)
    states = sequence.state_step
    assert states is None or states.end == context_len, "the step was staged for other tokens"
    return Segment(size, context_len, first.blocks, wanted, first.first, tables, states)


def _numbers(numbers: list[int]) -> npt.NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def _spans(batch: Batch) -> list[tuple[Sequence, int, int, bool]]:
    """(sequence, first position, num tokens, whether the last row is sampled), in row order."""
    decodes = [(s, s.num_launched, 1, True) for s in batch.decodes]
    return decodes + [(c.sequence, c.start, c.num_tokens, c.completes) for c in batch.chunks]


def _sample_row(sequence: Sequence, grammar_mask: TokenMask | None, vocab_size: int) -> SampleRow:
    params = sequence.sampling
    allowed = grammar_mask
    if params.allowed_token_ids is not None:
        listed = mask_of(params.allowed_token_ids, vocab_size)
        allowed = listed if allowed is None else allowed & listed
    return SampleRow(
        params,
        sequence.next_index,
        history=_history(sequence) if params.penalizes else None,
        allowed=allowed,
        forbidden=_ends_of_bad_words(sequence) if params.bad_words else (),
    )


def _history(sequence: Sequence) -> TokenHistory:
    """The sequence's token history, extended by the tokens since the last step."""
    if sequence.history is None:
        sequence.history = TokenHistory(sequence.tokens[: sequence.num_prompt])
    known = sequence.num_prompt + sequence.history.num_output
    sequence.history.extend(sequence.tokens[known:])
    return sequence.history


def _ends_of_bad_words(sequence: Sequence) -> list[int]:
    words = sequence.sampling.bad_words
    longest = max(map(len, words))
    start = max(sequence.num_prompt, sequence.num_tokens - longest)
    return words_ends(words, sequence.tokens[start:])
