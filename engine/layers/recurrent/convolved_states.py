"""What layers share that keep a state behind a convolution: each token's inputs go through a short
convolution over the last tokens, then a rule changes the sequence's recurrent state by them.

A layer's slot holds parts of a state, one after the other, so that ranks can share them out. A
part has a recurrent state of some heads and, behind it, the last inputs of the convolution for
these heads, [num_taps - 1, width of a part], all fp32. Knows no rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.functional import silu

from engine.attention.states import LayerStates, Piece


class Rule(Protocol):
    """One layer's rule for the N tokens of a batch; `convolved` [M, width] are those `at` some of
    them, fp32."""

    def consecutive(
        self, convolved: torch.Tensor, at: slice, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs [M, ...] of consecutive tokens of one sequence, and the state behind them.
        `state` is the state before them; None means an empty state."""

    def one_each(
        self, convolved: torch.Tensor, at: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """The outputs [M, ...] of one token of each of M sequences; their states `state`, [M, ...],
        are changed in place."""


class ConvolvedStates:
    """The states of one layer, in `num_parts` parts. `taps` are [num_taps, width] and `bias`
    [width], fp32; `shape` is that of a recurrent state, whose first dimension are its heads. Inputs
    of the convolution are made of `sections`, each of which has the same number for every part."""

    def __init__(
        self,
        num_parts: int,
        sections: Sequence[int],
        shape: Sequence[int],
        taps: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        self._num_parts = num_parts
        self._sections = list(sections)
        self._shape = tuple(shape)
        self._taps = taps
        self._bias = bias

    def run(
        self, inputs: torch.Tensor, states: LayerStates, rule: Rule, out: torch.Tensor
    ) -> torch.Tensor:
        """Fill `out` [N, ...] with the outputs of a batch's tokens, whose inputs are [N, width],
        fp32; the new states are stored."""
        for piece in states.plan.pieces:
            at = slice(piece.start, piece.end)
            out[at] = self._run_piece(inputs[at], states.slots, rule, piece)
        if len(states.plan.rows):
            rows = states.plan.rows
            out[rows] = self._run_rows(inputs[rows], states, rule)
        return out

    def _run_piece(
        self, inputs: torch.Tensor, slots: torch.Tensor, rule: Rule, piece: Piece
    ) -> torch.Tensor:
        """Consecutive tokens of one sequence, from a slot to another."""
        state, before = None, inputs.new_zeros(len(self._taps) - 1, inputs.shape[1])
        if piece.read is not None:
            state, before = self._state(slots[piece.read]), self._before(slots[piece.read])
        known, number = torch.cat((before, inputs)), len(inputs)
        convolved = known[:number] * self._taps[0]
        for tap, taps in enumerate(self._taps[1:], 1):
            convolved += known[tap : tap + number] * taps
        at = slice(piece.start, piece.end)
        out, state = rule.consecutive(self._activated(convolved), at, state)
        recurrent, last = self._split(slots[piece.write])
        recurrent.copy_(state.view(recurrent.shape))
        last.copy_(self._in_parts(known[number:]))
        return out

    def _run_rows(self, inputs: torch.Tensor, states: LayerStates, rule: Rule) -> torch.Tensor:
        """One token of each of several sequences."""
        slots, plan = states.slots, states.plan
        held = slots.index_select(0, plan.reads)
        state = self._state(held)
        known = torch.cat((self._before(held), inputs.unsqueeze(1)), dim=1)
        convolved = self._activated((known * self._taps).sum(1))
        out = rule.one_each(convolved, plan.rows, state)
        recurrent, last = self._split(slots)
        recurrent.index_copy_(0, plan.writes, state.view(len(state), *recurrent.shape[1:]))
        last.index_copy_(0, plan.writes, self._in_parts(known[:, 1:]))
        return out

    def _activated(self, convolved: torch.Tensor) -> torch.Tensor:
        return silu(convolved if self._bias is None else convolved + self._bias)

    def _split(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrent states and the last inputs in slots [..., parts, numbers], as views."""
        numbers = math.prod(self._shape) // self._num_parts
        return slots[..., :numbers], slots[..., numbers:]

    def _state(self, slots: torch.Tensor) -> torch.Tensor:
        """The recurrent states in slots, [..., *shape], contiguous."""
        recurrent, _ = self._split(slots)
        return recurrent.reshape(*slots.shape[:-2], *self._shape)

    def _before(self, slots: torch.Tensor) -> torch.Tensor:
        """The last inputs in slots, [..., num_taps - 1, width]."""
        _, last = self._split(slots)
        by_tap = last.unflatten(-1, (len(self._taps) - 1, -1)).transpose(-3, -2)
        widths = [section // self._num_parts for section in self._sections]
        return torch.cat([each.flatten(-2) for each in by_tap.split(widths, -1)], dim=-1)

    def _in_parts(self, before: torch.Tensor) -> torch.Tensor:
        """Inputs [..., num_taps - 1, width] as slots hold them, [..., parts, numbers]."""
        parts = (self._num_parts, -1)
        by_tap = [each.unflatten(-1, parts) for each in before.split(self._sections, -1)]
        return torch.cat(by_tap, dim=-1).transpose(-3, -2).flatten(-2)
