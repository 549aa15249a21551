"""The description of a kind of layer's tensors in a checkpoint, and its packed weights.

A kind packs tensors that are multiplied together into one weight, one under another. Knows no
kind, and not how tensors are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from engine.checkpoint.quantized_blocks import Matrix


class Split(Enum):
    """How a weight is shared out to ranks."""

    NONE = "every rank has the whole"
    OUTPUTS = "each has some rows of each tensor"
    INPUTS = "each has some columns"
    TOKENS = "each has the rows of some tokens"
    FIRST = "the first rank has the whole, the others zeros: their sums are added"


@dataclass(frozen=True)
class Rows:
    """The rows of a weight that one tensor of the checkpoint holds, named within its half of the
    layer. `num_heads`: of q and k, whose rows some files hold in rotated pairs. `middle`: further
    dimensions, of 1, that files have between rows and inputs. `sections`: numbers of rows that are
    shared out to ranks each on their own; none: all rows together."""

    name: str
    count: int
    num_heads: int | None = None
    middle: tuple[int, ...] = ()
    sections: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerTensor:
    """One weight of a kind of layer, [rows, inputs], or [rows] without inputs. `is_wide`: held in
    fp32, whatever the model's dtype. `offset` is added to the values that are stored.
    `input_sections` are to inputs what `Rows.sections` are to rows."""

    name: str
    rows: Sequence[Rows]
    inputs: int | None = None
    split: Split = Split.NONE
    is_wide: bool = False
    offset: float = 0.0
    input_sections: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The packed weight's shape."""
        num_rows = sum(rows.count for rows in self.rows)
        return (num_rows,) if self.inputs is None else (num_rows, self.inputs)


@dataclass
class KindWeights:
    """The weights of one layer's attention or feed-forward half, by the names of its kind's
    `tensors`; quantized matrices may be blocks. Wide matrices are among the vectors."""

    matrices: dict[str, Matrix] = field(default_factory=dict)
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)
