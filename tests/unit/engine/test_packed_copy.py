"""A step's small arrays go to a card by one copy, and arrive as they were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import Segment
from engine.gpu.graphs import DecodeGraphs
from engine.model_runner import ModelRunner
from engine.packed_copy import on_device, pack, unpack
from engine.sampling.grammar import Grammars
from engine.sampling.row_parameters import RowNumbers
from engine.sampling.sample_row import SampleRow
from engine.sampling.sampler import Sampler
from engine.sampling.token_history import TokenHistory, mask_of
from protocol.sampling import SamplingParams
from scheduling.batch import Batch, Chunk
from scheduling.sequence import Sequence as TokenSequence
from scheduling.sequence import SequenceState
from tests.effort import times
from tests.sequences import greedy, sequence_of
from tests.unit.engine.counted_card import CountedCard

VOCAB, BLOCK = 50, 4
CPU = torch.device("cpu")
EVERYTHING = {
    "top_k": 9,
    "top_p": 0.8,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "logit_bias": {3: 1.0},
    "min_tokens": 9,
    "stop_token_ids": (7,),
    "logprobs": 2,
}
DTYPES = st.sampled_from(["bool", "uint8", "int32", "int64", "float32", "float64"])
SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=2)


def row(**params: object) -> SampleRow:
    history = TokenHistory([1, 2])
    history.extend([4])
    fields = {"max_tokens": 9, "seed": 3, **params}
    return SampleRow(SamplingParams(**fields), 1, history, mask_of((3, 4, 5), VOCAB), (5,))  # type: ignore[arg-type]


@settings(max_examples=times(50, 300), deadline=None, derandomize=True)
@given(st.lists(st.tuples(DTYPES, SHAPES), max_size=8), st.integers(0, 99))
def test_arrays_come_out_of_one_piece_of_memory_as_they_went_in(
    kinds: list[tuple[str, list[int]]], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    arrays = [generator.integers(0, 200, shape).astype(dtype) for dtype, shape in kinds]
    packed = pack(arrays)
    views = unpack(packed, arrays)
    for array, view in zip(arrays, views, strict=True):
        assert view.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
        assert view.storage_offset() * view.element_size() % 16 == 0
        np.testing.assert_array_equal(view.numpy(), array)
        assert view.numpy().dtype == array.dtype


def test_arrays_of_one_copy_do_not_share_memory_with_those_of_the_next() -> None:
    """A card may still read the one when the next is made."""
    arrays = [np.arange(5)]
    first, second = pack(arrays), pack(arrays)
    second.zero_()
    assert unpack(first, arrays)[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("rows", "num_copies"),
    [
        ([row(**EVERYTHING), row(temperature=0.0), row()], 1),
        ([SampleRow(SamplingParams(max_tokens=9, seed=1, top_p=0.9), 0)], 1),
        ([SampleRow(greedy(9), 0)], 0),
    ],
)
def test_all_that_the_rows_of_a_step_need_goes_to_a_card_by_one_copy(
    rows: list[SampleRow], num_copies: int
) -> None:
    with CountedCard() as card:
        logits = torch.empty((len(rows), VOCAB), device=card.device)
        choices = Sampler(VOCAB).choose(logits, rows)
        assert card.num_in == num_copies
        choices.on_host()
    assert card.num_out == (6 if choices.logprobs else 3)


def test_a_cards_numbers_have_the_types_and_shapes_of_the_hosts() -> None:
    rows = [row(**EVERYTHING), row(temperature=0.0), row()]
    with CountedCard() as card:
        there = RowNumbers.of(rows, VOCAB, card.device)
    here = RowNumbers.of(rows, VOCAB, CPU)
    for part in ("adjustments", "draws"):
        expected = vars(getattr(here, part))
        assert all(each is not None for each in expected.values())
        for name, numbers in vars(getattr(there, part)).items():
            if isinstance(numbers, torch.Tensor):
                assert numbers.shape == expected[name].shape
                assert numbers.dtype == expected[name].dtype


class Model:
    """Logits on `device`, of no numbers."""

    config = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: object,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return tokens if rows is None else tokens.index_select(0, rows)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.empty((len(hidden), VOCAB), device=self.device)


class Attention:
    """Plans nothing."""

    def plan(self, segments: Sequence[Segment]) -> None:
        pass


def decoding(name: str) -> TokenSequence:
    params = SamplingParams(max_tokens=9, seed=1, top_p=0.9)
    sequence = sequence_of([1, 2, 3, 4, 5], params, BLOCK, request_id=name)
    sequence.state, sequence.num_computed, sequence.block_table = SequenceState.RUNNING, 4, [0, 1]
    return sequence


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_step_copies_its_inputs_at_once_and_its_rows_at_once(has_graphs: bool) -> None:
    """Tokens, positions, and the places of tokens that only the card knows; then the sampler's."""
    sequences = [decoding("a"), decoding("b")]
    with CountedCard() as card:
        model, sampler = Model(card.device), Sampler(VOCAB)
        graphs = None
        if has_graphs:
            graphs = DecodeGraphs(model, lambda size: Attention(), [2], lambda run: run)  # type: ignore
        runner = ModelRunner(model, Attention(), sampler, Grammars(Path("none"), VOCAB, ()), graphs)  # type: ignore[arg-type]
        before = runner.launch_ahead(Batch(decodes=sequences), None)
        for sequence in sequences:
            sequence.num_ahead = 1
        card.num_in = 0
        runner.launch_ahead(Batch(decodes=sequences), before)
        assert card.num_in == 2
        if not has_graphs:
            prompt = sequence_of([1] * 9, greedy(3), BLOCK, request_id="prompt")
            chunk = Chunk(prompt, 0, 8, completes=False)
            card.num_in = 0
            runner.launch_ahead(Batch(sequences, [chunk]), before)
            assert card.num_in == 2


def test_host_memory_is_used_where_it_is() -> None:
    array = np.arange(4)
    assert on_device({"a": array}, CPU)["a"].data_ptr() == array.ctypes.data
