"""The operations between a layer's matrix products: norms, rotary embedding, the gate.

`TorchOps` uses torch operations, on any device and dtype. `engine.cpu.native_ops` and
`engine.gpu.ops` have faster ones. All compute in fp32 and round to the model's dtype. Knows nothing
of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch.nn.functional import gelu, silu

from engine.attention.base import KvTarget
from engine.layers.rope import rotate
from engine.models.architectures import CLAMPED_SWIGLU

_tanh_gelu = partial(gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
}
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [N, head_dim / 2]."""


class LayerOps(Protocol):
    """The operations of one model, in its dtype."""

    rotation_dtype: torch.dtype
    """The dtype that `rotate` expects for cos and sin."""

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float | None = None,
        add: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """RMSNorm of the rows of `x` [N, size], contiguous, scaled by `weight` [size], fp32; plus
        `add` [N, size] if it is given. `eps`, if given, replaces the model's."""

    def rotate(
        self, heads: torch.Tensor, weight: torch.Tensor | None, rotation: Rotation
    ) -> torch.Tensor:
        """`heads` [N, num_heads, head_dim] rotated. With `weight` [num_heads, head_dim], fp32, each
        head is first normed with its row of the weight. May change `heads` in place."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The activation of the first half of `gate_up` [N, 2 * size] times the second half."""


@runtime_checkable
class StoringOps(LayerOps, Protocol):
    """Operations that rotate k on its way into the pool."""

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        weight: torch.Tensor | None,
        rotation: Rotation,
        target: KvTarget,
    ) -> torch.Tensor:
        """Rotates q in place and returns it, [N, num_heads, head_dim]; stores the rotated k and
        the v in `target`.

        `heads` is [N, num_heads + 2 * num_kv_heads, head_dim], contiguous. With `weight`
        [num_heads + num_kv_heads, head_dim], the heads of q and k are normed first.
        """


class TorchOps:
    """`LayerOps` in torch, with the model's `hidden_act` and RMSNorm's `eps`."""

    def __init__(self, hidden_act: str, eps: float, dtype: torch.dtype) -> None:
        self.rotation_dtype = dtype
        self._activation = None if hidden_act == CLAMPED_SWIGLU else _ACTIVATIONS[hidden_act]
        self._eps = eps

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float | None = None,
        add: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See LayerOps; `x` may have more dimensions."""
        wide = x.to(torch.float32)
        scale = torch.rsqrt(
            wide.square().mean(-1, keepdim=True) + (self._eps if eps is None else eps)
        )
        normed = wide * scale * weight
        return (normed if add is None else add + normed).to(x.dtype)

    def rotate(
        self, heads: torch.Tensor, weight: torch.Tensor | None, rotation: Rotation
    ) -> torch.Tensor:
        """See LayerOps."""
        if weight is not None:
            heads = self.norm(heads, weight)
        return rotate(heads, *rotation)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        gate, up = gate_up.chunk(2, dim=-1)
        if self._activation is None:
            return _clamped_swiglu(gate.float(), up.float()).to(gate_up.dtype)
        return self._activation(gate) * up


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's activation times its gated half."""
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(min=-SWIGLU_LIMIT, max=SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
