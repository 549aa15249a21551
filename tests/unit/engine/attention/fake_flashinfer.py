"""FlashInfer's wrappers as its documentation has them, in plain torch, for machines without a card.

They take what ours pass them apart the way the kernels do: pages by indptr and indices, lengths
by the last page, views by strides, `window_left` tokens before each query. Parameters have the
library's names and defaults as far as they are used, and nothing else is accepted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

Cache = tuple[torch.Tensor, torch.Tensor]


@dataclass
class _Said:
    """The arguments of a `plan` beside its arrays."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window_left: int
    dtypes: tuple[Any, Any]  # of queries, of KV
    scoring: tuple[float | None, float | None] = (None, None)  # the scale, the cap
    causal: bool = False


class _Wrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"

    def _keep(self, arrays: tuple[torch.Tensor, ...], said: _Said) -> None:
        for array in arrays:
            assert array.dtype == torch.int32
            assert array.dim() == 1
        self._arrays = [array.clone() for array in arrays]
        self._said = said

    def _attend(self, q: torch.Tensor, cache: Cache, out: torch.Tensor | None) -> torch.Tensor:
        query_starts, starts, blocks, last_lens = self._arrays
        said = self._said
        assert q.shape[1:] == (said.num_qo_heads, said.head_dim)
        assert len(q) == query_starts[-1], "q must have the planned rows"
        keys, values = cache
        assert (q.dtype, keys.dtype) == said.dtypes, "kernels are chosen by what the plan said"
        assert keys.stride() == values.stride()
        assert keys.shape[1:] == (said.num_kv_heads, said.page_size, said.head_dim)
        result = torch.empty_like(q) if out is None else out
        for index in range(len(last_lens)):
            pages = blocks[starts[index] : starts[index + 1]].long()
            length = (len(pages) - 1) * said.page_size + int(last_lens[index])
            k, v = (c[pages].transpose(1, 2).flatten(0, 1)[:length] for c in (keys, values))
            rows = slice(int(query_starts[index]), int(query_starts[index + 1]))
            result[rows] = self._dense(q[rows], k.to(q.dtype), v.to(q.dtype))
        return result

    def _dense(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """kv_idx + qo_len + window_left >= kv_len + qo_idx, as the library's kernels mask."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scale, cap = self._said.scoring
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or 1 / math.sqrt(q.shape[2]))
        if cap:
            scores = cap * torch.tanh(scores / cap)
        query, key = torch.arange(len(q))[:, None], torch.arange(len(k))
        visible = torch.ones(len(q), len(k), dtype=torch.bool)
        if self._said.causal:
            visible &= key <= len(k) - len(q) + query
        if self._said.window_left >= 0:
            visible &= key + len(q) + self._said.window_left >= len(k) + query
        scores = scores.masked_fill(~visible, -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """Decode: one query per sequence."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert backend in ("auto", "fa2")
        self.use_tensor_cores = use_tensor_cores

    def plan(  # noqa: PLR0913 - the library's
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        """As the library's."""
        query_starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        scoring = (sm_scale, logits_soft_cap)
        said = _Said(*sizes, window_left, (q_data_type, kv_data_type), scoring)
        self._keep((query_starts, indptr, indices, last_page_len), said)

    def run(
        self, q: torch.Tensor, paged_kv_cache: Cache, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As the library's."""
        return self._attend(q, paged_kv_cache, out)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Decode that reads its arrays from buffers which stay where they are."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(workspace_buffer, kv_layout, use_tensor_cores=use_tensor_cores)
        self._buffers = (indptr_buffer, indices_buffer, last_page_len_buffer)
        self.is_looked_up = False

    def plan(self, indptr: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """As the library's: copies into the buffers."""
        super().plan(indptr, *args, **kwargs)
        for buffer, array in zip(self._buffers, self._arrays[1:], strict=True):
            buffer[: len(array)].copy_(array)
        self.is_looked_up = True

    def run(
        self, q: torch.Tensor, paged_kv_cache: Cache, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As the library's: what counts is what lies in the buffers."""
        indptr, indices, last = self._buffers
        self._arrays[1:] = [indptr, indices[: indptr[-1]], last]
        return self._attend(q, paged_kv_cache, out)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Ragged chunks of queries."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert backend in ("fa2", "fa3")

    def plan(  # noqa: PLR0913 - the library's
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        """As the library's."""
        assert max_token_per_sequence in (None, int(qo_indptr.diff().max()))
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        scoring = (sm_scale, logits_soft_cap)
        said = _Said(*sizes, window_left, (q_data_type, kv_data_type), scoring, causal)
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._keep(arrays, said)

    def run(
        self, q: torch.Tensor, paged_kv_cache: Cache, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As the library's."""
        return self._attend(q, paged_kv_cache, out)


def fast_decode_plan(
    self: CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    **arguments: Any,
) -> None:
    """As the library's: plans, copies nothing, and needs what a first `plan` has looked up."""
    assert self.is_looked_up
    BatchDecodeWithPagedKVCacheWrapper.plan(self, indptr, indices, last_page_len, **arguments)
