"""Log-probabilities of a prompt: their numbers, whatever the slices; a record that starts over."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from engine.sampling.prompt_logprobs import prompt_rows, record_chunk
from protocol.sampling import PromptLogprob, PromptLogprobs, SamplingParams
from scheduling.batch import Chunk
from scheduling.prompt_record import PromptRecord
from scheduling.sequence import Sequence
from tests.sequences import sequence_of

HIDDEN, VOCAB, LENGTH = 6, 40, 11


class Projection:
    """A model's last layer; notes how many rows it was asked for at a time."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.hidden = torch.randn(LENGTH, HIDDEN, generator=generator)
        self.config = type("Config", (), {"vocab_size": VOCAB})
        self.sizes: list[int] = []

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        return x @ self.weight.T


def scored(count: int) -> Sequence:
    prompt = [(7 * each) % VOCAB for each in range(LENGTH)]
    return sequence_of(prompt, SamplingParams(max_tokens=4, seed=0, prompt_logprobs=count), 4)


def record(model: Projection, sequence: Sequence, *starts: int, rows: int = 99) -> None:
    for start, end in zip(starts, (*starts[1:], LENGTH), strict=True):
        size = end - start if end > start else LENGTH - start
        chunk = Chunk(sequence, start, size, start + size == LENGTH)
        hidden = model.hidden[start : start + size]
        record_chunk(cast(Any, model), hidden, chunk, rows * VOCAB)


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("starts", [(0,), (0, 4), (0, 4, 8), (0, 10)])
@pytest.mark.parametrize("rows", [1, 3, 99])
def test_every_token_but_the_first_has_its_numbers(
    count: int, starts: tuple[int, ...], rows: int
) -> None:
    model, sequence = Projection(), scored(count)
    record(model, sequence, *starts, rows=rows)
    told = sequence.take_prompt_logprobs()
    assert told is not None
    assert told.fits(LENGTH)
    assert max(model.sizes) <= rows
    assert sum(model.sizes) == LENGTH - 1, "the last position says nothing of the prompt"
    expected = (model.hidden @ model.weight.T).log_softmax(dim=-1)
    for entry, row, token_id in zip(told.entries(), expected, sequence.tokens[1:], strict=False):
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=1e-5)
        assert entry.rank == 1 + int((row > row[token_id]).sum())
        best = row.topk(count)
        assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_prompt_that_begins_anew_forgets_what_it_knew() -> None:
    whole, again = scored(2), scored(2)
    model = Projection()
    record(model, whole, 0, 4, 8)
    record(model, again, 0, 6)
    record(model, again, 0, 4, 8)
    assert again.take_prompt_logprobs() == whole.take_prompt_logprobs()


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    sequence = scored(3)
    del sequence.tokens[1:]
    model = Projection()
    record_chunk(cast(Any, model), model.hidden[:1], Chunk(sequence, 0, 1, True))
    told = sequence.take_prompt_logprobs()
    assert told == PromptLogprobs(3, b"", b"", b"", b"")
    assert told.fits(1)
    assert told.entries() == []


def test_ties_share_the_better_rank() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0, 3.0]])
    packed = PromptRecord(0)
    packed.put(0, prompt_rows(logits, torch.tensor([1]), 0))
    [entry] = packed.whole().entries()
    assert entry == PromptLogprob(entry.logprob, 2, ())


@pytest.mark.parametrize("part", ["logprobs", "ranks", "top_ids", "top_logprobs"])
def test_what_is_not_whole_does_not_fit(part: str) -> None:
    whole = {"logprobs": bytes(8), "ranks": bytes(8), "top_ids": bytes(16)}
    whole |= {"top_logprobs": bytes(16)}
    assert PromptLogprobs(2, **whole).fits(3)
    assert not PromptLogprobs(2, **whole).fits(4)
    assert not PromptLogprobs(-2, **whole).fits(3)
    assert not PromptLogprobs(2, **whole | {part: whole[part][1:]}).fits(3)
