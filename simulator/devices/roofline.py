"""Predicts steps by a roofline: each part takes as long as its arithmetic or its memory traffic.

The parts follow each other: products with the weights, attention of chunks and of decodes, the
output matrix, exchanges among the cards of a worker, launches. Weights and heads are split over the
cards; each card reads its share. Layers with windows attend only to their windows. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import ConfigError
from simulator.devices.cards import Card
from simulator.devices.model_shape import ModelShape
from simulator.devices.step_times import ChunkWork

_RESERVED = 0.08
"""The part of the memory for activations, graphs and buffers."""
_STATE_BYTES = 4
"""Of a number in a state."""


@dataclass(frozen=True)
class Precision:
    """Bytes of a weight and of a value in the KV cache."""

    weight_bytes: float = 2.0
    kv_bytes: float = 2.0


class Roofline:
    """One worker of `num_cards` cards."""

    def __init__(
        self, card: Card, shape: ModelShape, num_cards: int, precision: Precision | None = None
    ) -> None:
        self._card = card
        self._shape = shape
        self._cards = num_cards
        self._precision = precision or Precision()
        self._bandwidth = card.memory_bytes_per_s * card.memory_share * num_cards
        self._attention_flops = card.flops * card.attention_share * num_cards
        self._lines: dict[tuple[int, int], float] = {}
        # for each token that a decode attends to, in one layer
        self._token_s = max(
            self._pair_flops / self._attention_flops, self._kv_bytes_read / self._bandwidth
        )
        self._slope = shape.full_layers * self._token_s
        self._row_s = self._windows_s() + self._states_s()

    @property
    def kv_bytes_per_token(self) -> float:
        """KV of a token in all layers on all cards, each value once."""
        return self._shape.kv_layers * self._shape.kv_values * self._precision.kv_bytes

    @property
    def _kv_bytes_read(self) -> float:
        """KV of a token and layer that all cards together read. More cards than KV heads hold
        copies."""
        copies = max(1.0, self._cards / self._shape.num_kv_heads)
        return self._shape.kv_values * self._precision.kv_bytes * copies

    @property
    def _pair_flops(self) -> float:
        """Operations for one query and one key, in one layer."""
        return 2.0 * self._shape.attended_values

    def _windows_s(self) -> float:
        """The time of a decode's attention in layers with windows, which are assumed to be full."""
        tokens = sum(window * number for window, number in self._shape.windows)
        return tokens * self._token_s

    def _states_s(self) -> float:
        """The time to read and write a sequence's states."""
        groups = [each for each in self._shape.groups if each.state_numbers is not None]
        numbers = sum(len(each.layers) * (each.state_numbers or 0) for each in groups)
        return 2.0 * numbers * _STATE_BYTES / self._bandwidth

    @property
    def weight_bytes(self) -> float:
        """The weights on all cards."""
        return self._shape.num_params * self._precision.weight_bytes

    def pool_blocks(self, block_size: int) -> int:
        """The KV blocks that fit beside the weights. Raises ConfigError if none do."""
        room = self._card.memory_bytes * self._cards * (1 - _RESERVED) - self.weight_bytes
        block_bytes = self._kv_bytes_read * self._shape.kv_layers * block_size
        if room < block_bytes:
            raise ConfigError(
                f"the weights of {self._shape.name} take {self.weight_bytes / 1e9:,.0f} GB, and "
                f"{self._cards} x {self._card.name} leave no room for KV: raise --tp"
            )
        return int(room / block_bytes)

    def decode_line(self, num_rows: int) -> tuple[float, float]:
        """See `StepTimes`."""
        return self._fixed(num_rows, num_rows) + num_rows * self._row_s, self._slope

    def seconds(self, num_rows: int, context: int, chunks: ChunkWork) -> float:
        """See `StepTimes`."""
        fixed = self._fixed(num_rows + chunks.num_tokens, num_rows + chunks.num_completed)
        pairs, read = self._shape.full_layers * chunks.pairs, chunks.read_tokens
        read *= self._shape.full_layers
        for (_, number), within in zip(self._shape.windows, chunks.within, strict=False):
            pairs, read = pairs + number * within[0], read + number * within[1]
        computing = self._pair_flops * pairs / self._attention_flops
        reading = self._kv_bytes_read * read / self._bandwidth
        decodes = self._slope * context + self._row_s * num_rows
        return fixed + decodes + max(computing, reading)

    def _fixed(self, num_tokens: int, num_sampled: int) -> float:
        """The time of a step without attention."""
        known = self._lines.get((num_tokens, num_sampled))
        if known is None:
            known = self._products(num_tokens) + self._head(num_sampled)
            known += self._exchanges(num_tokens) + self._card.step_s
            known += self._card.layer_s * self._shape.num_layers
            self._lines[num_tokens, num_sampled] = known
        return known

    def _products(self, num_tokens: int) -> float:
        """The time of the products with the weights of all layers."""
        shape, layers = self._shape, self._shape.num_layers
        with_experts = layers - shape.dense_layers
        dense = layers * shape.attention_params + with_experts * shape.dense_params
        dense += shape.dense_layers * shape.lone_params
        seconds = self._product(num_tokens, dense)
        if shape.num_experts:
            share = shape.experts_per_token / shape.num_experts
            touched = shape.num_experts * (1.0 - (1.0 - share) ** num_tokens)
            rows = num_tokens * shape.experts_per_token / max(touched, 1e-9)
            seconds += self._product(rows, with_experts * touched * shape.expert_params)
        return seconds

    def _head(self, num_sampled: int) -> float:
        return self._product(num_sampled, self._shape.head_params) if num_sampled else 0.0

    def _product(self, num_rows: float, params: float) -> float:
        """The time to multiply `num_rows` rows by matrices of `params` weights."""
        card = self._card
        share = card.matrix_share * num_rows / (num_rows + card.half_rows)
        computing = 2.0 * num_rows * params / (card.flops * share * self._cards)
        return max(computing, params * self._precision.weight_bytes / self._bandwidth)

    def _exchanges(self, num_tokens: int) -> float:
        """The time to sum partial results over the cards, twice per layer."""
        if self._cards == 1:
            return 0.0
        card, num_bytes = self._card, 2.0 * num_tokens * self._shape.hidden_size
        moved = 2.0 * (self._cards - 1) / self._cards * num_bytes / card.peer_bytes_per_s
        return 2.0 * self._shape.num_layers * (card.peer_latency_s + moved)
