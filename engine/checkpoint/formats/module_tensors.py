"""The stored tensors of one quantized module: checked by the headers, read when asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.checkpoint.files import TensorEntry
from engine.checkpoint.formats.quantization import PER_OUTPUT, PER_TENSOR, Sharing, WeightGroup
from engine.checkpoint.stored_tensors import StoredTensors
from protocol.errors import ModelLoadError

SCALE_DTYPES = ("F32", "BF16", "F16")
EXPONENTS = ("U8", "F8_E8M0")
"""How powers of two may be stored, with a bias of 127."""
Shape = tuple[int, ...]


class ModuleTensors:
    """Tensors whose names are `module` and a suffix. Remembers those that were asked for."""

    def __init__(self, tensors: StoredTensors, module: str) -> None:
        self._tensors = tensors
        self._module = module
        self._used: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors that were needed."""
        return tuple(self._used)

    def has(self, suffix: str) -> bool:
        """Whether the tensor is there."""
        return self._module + suffix in self._tensors.entries

    def need(self, suffix: str, dtypes: Sequence[str], *shapes: Shape) -> TensorEntry:
        """The tensor, which must have one of these types and, if shapes are given, one of these
        shapes. Raises ModelLoadError."""
        name = self._module + suffix
        entry = self._tensors.entries.get(name)
        if entry is None:
            raise ModelLoadError(f"{self._tensors.where}: tensor {name!r} is missing")
        if entry.dtype not in dtypes:
            raise ModelLoadError(
                f"{entry.file}: tensor {name!r} is stored as {entry.dtype}; "
                f"expected is {' or '.join(dtypes)}"
            )
        if shapes and entry.shape not in shapes:
            raise self.wrong(suffix, " or ".join(str(list(shape)) for shape in shapes))
        self._used[name] = None
        return entry

    def need_matrix(self, suffix: str, dtypes: Sequence[str]) -> tuple[int, int]:
        """The shape of a tensor that must have two dimensions, neither of them 0."""
        entry = self.need(suffix, dtypes)
        if len(entry.shape) != 2 or 0 in entry.shape:
            raise self.wrong(suffix, "two dimensions")
        return entry.shape[0], entry.shape[1]

    def need_scales(
        self, suffix: str, groups: Sequence[WeightGroup], shape: tuple[int, int]
    ) -> WeightGroup:
        """The first of `groups` that matches the stored scales of a weight of `shape`. Raises
        ModelLoadError."""
        entry = self.need(suffix, (*SCALE_DTYPES, *EXPONENTS))
        for group in groups:
            if entry.shape in scale_shapes(group.sharing, shape):
                return group
        expected = [str(list(scale_shapes(group.sharing, shape)[0])) for group in groups]
        raise self.wrong(suffix, " or ".join(dict.fromkeys(expected)) or "a known quantization")

    def wrong(self, suffix: str, expected: str) -> ModelLoadError:
        """The error that states the shape of a tensor, and the expected one."""
        name = self._module + suffix
        entry = self._tensors.entries[name]
        return ModelLoadError(
            f"{entry.file}: tensor {name!r} has the shape {list(entry.shape)}; "
            f"expected is {expected}"
        )

    def need_factor(self, suffix: str) -> None:
        """Check that the tensor, of one number, is one by which weights can be scaled. Raises
        ModelLoadError."""
        value = float(as_float(self.read(suffix)))
        if not 0 < value < math.inf:
            name = self._module + suffix
            raise ModelLoadError(
                f"{self._tensors.entries[name].file}: tensor {name!r} is {value:g}; expected is a "
                "finite number above 0"
            )

    def read(self, suffix: str) -> torch.Tensor:
        """The tensor as it is stored, a mapping of its file."""
        return self._tensors.read(self._module + suffix)

    def scales(self, suffix: str, rows: slice, sharing: Sharing) -> torch.Tensor:
        """The scales of some rows, [rows, groups], fp32."""
        return of_rows(as_float(self.read(suffix)), rows, sharing)


def scale_shapes(sharing: Sharing, shape: tuple[int, int]) -> list[Shape]:
    """The shapes in which the scales of a weight [outputs, inputs] may be stored, usual first."""
    if sharing == PER_TENSOR:
        return [(1,), (), (1, 1)]
    counts = sharing.counts(shape)
    if sharing == PER_OUTPUT:
        return [counts, counts[:1]]
    return [counts, (counts[0], 1, counts[1], 1)]  # ModelOpt's blocks have four dimensions


def as_float(stored: torch.Tensor) -> torch.Tensor:
    """Stored scales in fp32; bytes are exponents."""
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e8m0fnu)
    return stored.float()


def of_rows(shared: torch.Tensor, rows: slice, sharing: Sharing) -> torch.Tensor:
    """The part for some rows of values that outputs and inputs share, [rows, groups]."""
    if sharing.outputs is None:
        return shared.reshape(1, -1).expand(rows.stop - rows.start, -1)
    places = torch.arange(rows.start, rows.stop) // sharing.outputs
    return shared.reshape(len(shared), -1)[places]


def nibbles(stored: torch.Tensor) -> torch.Tensor:
    """The codes of 4 bits in each row of words or bytes, lower bits first, uint8."""
    packed = stored.contiguous().view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
