"""What layers share that keep a state behind a convolution: each token's inputs go through a short
convolution over the last tokens, then a rule changes the sequence's recurrent state by them.

A layer's slot holds the recurrent state and, behind it, the last inputs of the convolution,
[num_taps - 1, width], both fp32. Knows no rule.
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
    """The states of one layer. `taps` are [num_taps, width] and `bias` [width], fp32; `shape` is
    that of a recurrent state."""

    def __init__(
        self, taps: torch.Tensor, shape: Sequence[int], bias: torch.Tensor | None = None
    ) -> None:
        self._taps = taps
        self._shape = tuple(shape)
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
            state, before = self._parts(slots[piece.read])
        known, number = torch.cat((before, inputs)), len(inputs)
        convolved = known[:number] * self._taps[0]
        for tap, taps in enumerate(self._taps[1:], 1):
            convolved += known[tap : tap + number] * taps
        at = slice(piece.start, piece.end)
        out, state = rule.consecutive(self._activated(convolved), at, state)
        new_state, new_before = self._parts(slots[piece.write])
        new_state.copy_(state)
        new_before.copy_(known[number:])
        return out

    def _run_rows(self, inputs: torch.Tensor, states: LayerStates, rule: Rule) -> torch.Tensor:
        """One token of each of several sequences."""
        plan = states.plan
        held = states.slots.index_select(0, plan.reads)
        state, before = self._parts(held)
        known = torch.cat((before, inputs.unsqueeze(1)), dim=1)
        convolved = self._activated((known * self._taps).sum(1))
        out = rule.one_each(convolved, plan.rows, state)
        before.copy_(known[:, 1:])
        states.slots.index_copy_(0, plan.writes, held)
        return out

    def _activated(self, convolved: torch.Tensor) -> torch.Tensor:
        return silu(convolved if self._bias is None else convolved + self._bias)

    def _parts(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrent states and the last inputs in slots [..., state_numbers], as views."""
        split = math.prod(self._shape)
        before = (len(self._taps) - 1, self._taps.shape[1])
        return slots[..., :split].unflatten(-1, self._shape), slots[..., split:].unflatten(
            -1, before
        )
