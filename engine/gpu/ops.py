"""`LayerOps` with Triton kernels, for bf16 and fp16 on a CUDA card; fuses rotating and storing.

Launches the kernels of `engine.gpu.kernels`. Knows nothing of layers, blocks or batches: the
attention backend plans the slot of each token's key and value.
"""

from __future__ import annotations

import torch

from engine.attention.base import KvTarget
from engine.gpu import kernels
from engine.gpu.fp8_format import FP8, FP8_LIMIT
from engine.layers.ops import Rotation, TorchOps

_GATE_BLOCK = 1024
_SEARCH_BLOCK, _SEARCH_WARPS = 1024, 8
ROUNDING = {"enable_fp_fusion": False}
"""Options of every launch: products and sums round one by one, as they are written. The default
differs between versions of Triton, and workers of two versions have to round alike."""


class TritonOps:
    """`LayerOps` with the model's `hidden_act` and RMSNorm's `eps`, for tensors of `dtype`."""

    rotation_dtype = torch.float32

    def __init__(self, hidden_act: str, eps: float, dtype: torch.dtype) -> None:
        self._eps = eps
        self._is_silu = hidden_act == "silu"
        self._torch = TorchOps(hidden_act, eps, dtype)

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float | None = None,
        add: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See LayerOps."""
        assert x.is_contiguous()
        assert weight.is_contiguous()
        out = torch.empty_like(x)
        rows, size = x.shape
        if rows:
            block = _power_of_two(size)
            eps = self._eps if eps is None else eps
            kernels.rms_norm[(rows,)](
                x, weight, out, size, eps, BLOCK=block, num_warps=_warps(block), **ROUNDING
            )
        return out if add is None else out.add_(add)

    def rotate(
        self, heads: torch.Tensor, weight: torch.Tensor | None, rotation: Rotation
    ) -> torch.Tensor:
        """See LayerOps. Uses torch: a model on a card rotates in `rotate_and_store`."""
        cos, sin = (part.to(heads.dtype) for part in rotation)
        return self._torch.rotate(heads, weight, (cos, sin))

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        if not self._is_silu:
            return self._torch.gate(gate_up)
        assert gate_up.is_contiguous()
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size))
        if rows:
            grid = (rows, -(-size // _GATE_BLOCK))
            kernels.silu_gate[grid](gate_up, out, size, BLOCK=_GATE_BLOCK, **ROUNDING)
        return out

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        weight: torch.Tensor | None,
        rotation: Rotation,
        target: KvTarget,
    ) -> torch.Tensor:
        """Rotates q in place and returns it, [N, num_heads, head_dim]; stores the rotated k and
        the v in `target`.

        `heads` is [N, num_heads + 2 * num_kv_heads, head_dim], contiguous; head_dim / 2 must be a
        power of two. With `weight` [num_heads + num_kv_heads, head_dim], q and k are normed first.
        """
        return _launch(heads, target, weight, rotation, self._eps)


def scale_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`engine.gpu.fp8_linear.scaled_rows` of `x` [N, size], contiguous."""
    assert x.is_contiguous()
    rows, size = x.shape
    values = torch.empty_like(x, dtype=FP8)
    scales = x.new_empty((rows, 1), dtype=torch.float32)
    if rows:
        block = _power_of_two(size)
        kernels.scale_rows[(rows,)](
            x,
            values,
            scales,
            size,
            LIMIT=FP8_LIMIT,
            BLOCK=block,
            num_warps=_warps(block),
            **ROUNDING,
        )
    return values, scales


def lowest_kept(scaled: torch.Tensor, weights: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """`engine.sampling.top_p.lowest_kept` in one kernel: `scaled` [R, V], fp32, and `weights`
    [R, V], int64, contiguous; `needed` [R, 1], float64. Returns [R, 1]."""
    assert scaled.is_contiguous()
    assert weights.is_contiguous()
    rows, size = scaled.shape
    out = scaled.new_empty((rows, 1))
    if rows:
        kernels.lowest_kept[(rows,)](
            scaled,
            weights,
            needed.clamp(min=1.0).contiguous(),  # always keeps the most likely token
            out,
            size,
            BLOCK=_SEARCH_BLOCK,
            num_warps=_SEARCH_WARPS,
            **ROUNDING,
        )
    return out


def store(heads: torch.Tensor, target: KvTarget) -> None:
    """Store k and v without rotation. `heads` [N, 2 * num_kv_heads, head_dim], contiguous."""
    _launch(heads, target, None, None, 0.0)


def _launch(
    heads: torch.Tensor,
    target: KvTarget,
    weight: torch.Tensor | None,
    rotation: Rotation | None,
    eps: float,
) -> torch.Tensor:
    keys, values = target.keys, target.values
    num_tokens, num_heads, head_dim = heads.shape
    num_kv, block_size = keys.shape[1], keys.shape[2]
    half = head_dim // 2
    assert heads.is_contiguous()
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1
    assert half == _power_of_two(half), head_dim
    assert len(target.slots) >= num_tokens
    cos, sin = rotation if rotation is not None else (heads, heads)
    if num_tokens:
        kernels.rotate_and_store[(num_tokens, num_heads)](
            heads,
            heads if weight is None else weight,
            cos,
            sin,
            target.slots,
            keys,
            values,
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            num_heads - 2 * num_kv,
            num_kv,
            block_size,
            eps,
            target.k_scale,
            target.v_scale,
            HALF=half,
            NORMED=weight is not None,
            ROTATED=rotation is not None,
            LIMIT=FP8_LIMIT if keys.dtype == FP8 else 0.0,
            num_warps=1,
            **ROUNDING,
        )
    return heads[:, : num_heads - 2 * num_kv]


def _power_of_two(size: int) -> int:
    """The least power of two that is not less than `size`."""
    return 1 << max(size - 1, 0).bit_length()


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)
