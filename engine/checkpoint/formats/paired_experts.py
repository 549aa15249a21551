"""Offers gpt-oss's tensors of experts under the names and in the form of other models.

Its files hold matrices as [inputs, outputs], and the outputs of gate and up by turns: gate's first,
up's first, gate's second, and so on; biases, too. Blocks of MXFP4 are [outputs, inputs], and
`formats.float4` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from engine.checkpoint.files import TensorEntry
from engine.checkpoint.quantized_blocks import StoredRows
from engine.checkpoint.stored_tensors import StoredTensors

_EXPERT = re.compile(r"(.+\.experts\.\d+\.)(gate|up|down|gate_up)_proj\.(weight|bias)")
_HALVES = ("gate", "up")


class PairedExperts:
    """See StoredTensors."""

    def __init__(self, tensors: StoredTensors) -> None:
        self._tensors = tensors
        self.where = tensors.where
        self._changed: set[str] = set()
        self._kept: tuple[str, torch.Tensor] | None = None  # gate and up of the last expert
        entries: dict[str, TensorEntry] = {}
        for name, entry in tensors.entries.items():
            for each, changed in self._changed_entries(name, entry):
                entries[each] = changed
        self.entries: Mapping[str, TensorEntry] = entries

    @property
    def fingerprint(self) -> str:
        """See StoredTensors."""
        return self._tensors.fingerprint

    def read(self, name: str) -> torch.Tensor:
        """See StoredTensors."""
        if name not in self._changed:
            return self._tensors.read(name)
        match = _EXPERT.fullmatch(name)
        assert match is not None
        expert, part, kind = match.groups()
        if part == "down":
            return self._tensors.read(name).t()
        both = self._both(expert, kind)  # outputs last
        return both[..., _HALVES.index(part) :: 2].t()

    def panel_rows(self, name: str, pairs_of_heads: int | None) -> StoredRows | None:
        """See StoredTensors."""
        return None if name in self._changed else self._tensors.panel_rows(name, pairs_of_heads)

    def finish(self) -> None:
        """See StoredTensors."""
        self._kept = None
        self._tensors.finish()

    def _changed_entries(self, name: str, entry: TensorEntry) -> list[tuple[str, TensorEntry]]:
        """The entries that a stored tensor becomes. `expert_tensors` has taken both halves of a
        matrix's rows, which are inputs here, for gate and up. Of an odd number of outputs, both
        get one more than half, so that their shapes are wrong."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return [(name, entry)]
        expert, part, kind = match.groups()
        rows, *columns = entry.shape
        if kind == "bias":
            if part != "gate_up":
                return [(name, entry)]
            middle = (entry.begin + entry.end) // 2
            names = [f"{expert}{half}_proj.bias" for half in _HALVES]
            self._changed.update(names)
            shape = (-(-rows // 2),)
            return [
                (names[0], replace(entry, shape=shape, end=middle)),
                (names[1], replace(entry, shape=shape, begin=middle)),
            ]
        self._changed.add(name)
        if part == "down":
            return [(name, replace(entry, shape=(*columns, rows)))]
        return [(name, replace(entry, shape=(-(-columns[0] // 2), 2 * rows)))]

    def _both(self, expert: str, kind: str) -> torch.Tensor:
        """Gate and up together as they are stored: weights [inputs, outputs of both], or biases."""
        key = f"{expert}{kind}"
        if self._kept is not None and self._kept[0] == key:
            found, self._kept = self._kept[1], None
            return found
        if kind == "bias":
            found = self._tensors.read(f"{expert}gate_up_proj.bias")
        else:
            found = torch.cat([self._tensors.read(f"{expert}{h}_proj.weight") for h in _HALVES])
        self._kept = key, found
        return found
