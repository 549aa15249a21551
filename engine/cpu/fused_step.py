"""Runs a whole step of a bf16 model on a CPU in one call of our kernels: from tokens to the
likeliest next token of each sequence.

For batches without log-probabilities, penalties or random sampling. Between two steps the caches
are full of weights, so Python and torch code runs several times slower there than in a tight loop.
The kernels do not write the logits. They choose the same tokens as the sampler would from the
model's logits, bit for bit. `native/step.h` computes.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.groups import FusedAttention
from engine.checkpoint.quantized_blocks import PANEL_OUTPUTS
from engine.cpu.block_panels import BlockEmbedding, FileRows
from engine.cpu.fused_layers import Forward, FusedLayers
from engine.cpu.native_linear import NativeLinear, Weight
from engine.layers.rope import Rope
from engine.models.runnable import Likeliest


class _Step(ctypes.Structure):
    """Mirrors StepCall in native/step.h."""

    _fields_ = (
        ("forward", Forward),
        ("lm_head", Weight),
        *((name, ctypes.c_void_p) for name in ("embed", "token_ids", "final_norm")),
        *((name, ctypes.c_void_p) for name in ("largest", "values", "places")),
        *((name, ctypes.c_int64) for name in ("first_token", "num_tokens")),
        ("embed_blocks", FileRows),
        ("embedding_scale", ctypes.c_float),
    )


_LARGEST_BYTES = 8


@dataclass(frozen=True)
class Ends:
    """The weights before and after the layers. `embed` [own tokens, hidden] is bf16 or blocks,
    `final_norm` [hidden] is fp32. Embeddings are multiplied by `embedding_scale` and rounded to
    bf16. A rank's own tokens begin with `first_token`; a single rank owns the whole vocabulary."""

    embed: torch.Tensor | BlockEmbedding
    final_norm: torch.Tensor
    lm_head: NativeLinear
    first_token: int = 0
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        assert isinstance(self.embed, BlockEmbedding) or self.embed.dtype == torch.bfloat16
        assert self.final_norm.dtype == torch.float32
        for weight in (self.embed, self.final_norm):
            assert isinstance(weight, BlockEmbedding) or weight.is_contiguous()


class FusedStep:
    """Runs the steps of one model over one pool; used by one thread."""

    def __init__(
        self,
        ends: Ends,
        layers: FusedLayers,
        ropes: Sequence[Rope],
        attention: FusedAttention,
        kernels: ctypes.CDLL,
        vocab_size: int,
    ) -> None:
        self._ends = ends  # keeps the tensors alive that calls point to
        embed = ends.embed
        self._blocks = embed.rows if isinstance(embed, BlockEmbedding) else FileRows()
        self._embed = None if isinstance(embed, BlockEmbedding) else embed.data_ptr()
        self._layers = layers
        self._ropes = ropes
        self._attention = attention
        self._run = kernels.baton_step
        self._num_own = embed.num_tokens if isinstance(embed, BlockEmbedding) else len(embed)
        self._vocab_size = vocab_size
        self._num_panels = -(-ends.lm_head.weight.outputs // PANEL_OUTPUTS)
        self._largest = array("q")

    def __call__(
        self, token_ids: Sequence[int], positions: Sequence[int], rows: Sequence[int] | None
    ) -> Likeliest:
        """The likeliest of the own next tokens at `rows`, the planned segments' wanted rows (None:
        all rows). `token_ids` and `positions` are in the segments' order.

        Raises IndexError for a token outside the vocabulary.
        """
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise IndexError(f"a token id is outside the vocabulary of {self._vocab_size}")
        tokens, at = array("q", token_ids), array("q", positions)
        wanted = None if rows is None else array("q", rows)
        num_wanted = len(tokens) if wanted is None else len(wanted)
        if len(self._largest) < num_wanted * self._num_panels:
            self._largest = array("q", bytes(_LARGEST_BYTES * num_wanted * self._num_panels))
        values, places = array("f", bytes(4 * num_wanted)), array("q", bytes(8 * num_wanted))
        forward = self._layers.prepare(
            len(tokens),
            _address(at),
            None if wanted is None else (_address(wanted), num_wanted),
            [rope.tables(self._attention.longest) for rope in self._ropes],
            self._attention,
        )
        call = _Step(
            forward,
            self._ends.lm_head.weight,
            self._embed,
            _address(tokens),
            self._ends.final_norm.data_ptr(),
            _address(self._largest),
            _address(values),
            _address(places),
            self._ends.first_token,
            self._num_own,
            self._blocks,
            self._ends.embedding_scale,
        )
        self._run(ctypes.byref(call))
        self._layers.check()
        if self._ends.first_token:
            places = array("q", (self._ends.first_token + place for place in places))
        return Likeliest(values, places)


def _address(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]
