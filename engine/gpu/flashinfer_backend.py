"""The backend of a model on a CUDA card by FlashInfer's attention and our Triton kernels.

Owns the workspace that all attention objects share; they take turns on one stream. The backend is
created before the weights are loaded, and builds its kernels then. So a missing part of the machine
shows early, and a kernel that cannot be built is replaced by one that can.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import msgspec
import torch

from engine.attention.base import AttentionBackend, Segment
from engine.attention.flashinfer_attention import (
    FlashInferAttention,
    FlashInferChoice,
    FlashInferUnavailable,
    check_supported,
    choose_kernels,
    load_flashinfer,
    workspace_bytes,
)
from engine.attention.flashinfer_graph import DecodeBuffers, FixedDecode
from engine.attention.groups import by_group
from engine.attention.pool_layers import PoolLayers
from engine.backend import Sizes
from engine.checkpoint.model_config import ModelConfig
from engine.device import dtype_name, wait_for
from engine.gpu.toolchain import first_error, prepare_builds
from engine.gpu.triton_backend import TritonBackend
from engine.gpu.tuning import MixedStep, choose_mixed, faster_chunks
from engine.kv_pool import KvPool

logger = logging.getLogger(__name__)

_HOPPER = 9  # compute capability's major number
_TRIAL_BLOCK = 16


@dataclass(frozen=True)
class FlashInferLibrary:
    """FlashInfer on one card, and what its kernels depend on there."""

    flashinfer: ModuleType
    is_hopper: bool
    num_multiprocessors: int
    why_no_build: str = ""  # what is missing to build further kernels

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> FlashInferLibrary:
        """Load FlashInfer for a model on `device`, a card. Raises FlashInferUnavailable."""
        check_supported(device, dtype, head_dim)
        why_no_build = prepare_builds(os.environ, _cuda_major())
        library = load_flashinfer()
        return cls(
            library,
            torch.cuda.get_device_capability(device)[0] == _HOPPER,
            torch.cuda.get_device_properties(device).multi_processor_count,
            why_no_build,
        )


class FlashInferBackend(TritonBackend):
    """The kernels for one model and up to `max_sequences` decodes at once, built or loaded.

    fa2 replaces fa3 where fa3 cannot be built. Raises FlashInferUnavailable if FlashInfer cannot
    serve the model, or if a kernel cannot be built. `library` is FlashInfer, by default as it is
    installed.
    """

    def __init__(  # noqa: PLR0913 - as `CardBackend`, and three more
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        max_sequences: int = 256,
        *,
        weight_bits: int = 16,
        library: FlashInferLibrary | None = None,
    ) -> None:
        super().__init__(config, device, dtype, kv_dtype, weight_bits)
        library = library or FlashInferLibrary.on(device, dtype, config.head_dim)
        self._library = library.flashinfer
        heads = (config.num_heads, config.num_kv_heads)
        choice = choose_kernels(*heads, kv_dtype, library.is_hopper)
        num_bytes = workspace_bytes(
            heads, config.head_dim, max_sequences, library.num_multiprocessors
        )
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        logger.info("kernels of attention that were not built on this machine before take minutes")
        self.choice = self._built(choice, device, kv_dtype, library.why_no_build)
        logger.info(
            "attention by FlashInfer %s: prefill by %s, decode on %s",
            self._library.__version__,
            self.choice.prefill,
            "tensor cores" if self.choice.decode_on_tensor_cores else "plain cores",
        )

    @property
    def graph_wrappers(self) -> int:
        """Wrappers of FlashInfer in each graph."""
        return len(set(self._config.sliding_windows))

    def over(self, view: KvPool, choice: FlashInferChoice | None = None) -> FlashInferAttention:
        """Attention for any batch over the layers of one group, with the model's kernels or those
        of `choice`."""
        chosen = choice or self.choice
        return FlashInferAttention(self.layers(view), self._workspace, chosen, self._library)

    def tuned_attention(self, pool: KvPool, sizes: Sizes) -> AttentionBackend:
        """See Backend."""
        typical = MixedStep.typical(sizes.max_sequences, sizes.max_chunk, sizes.context)
        return by_group(pool, lambda view: self.tuned_for(view, typical))

    def tuned_for(self, pool: KvPool, typical: MixedStep) -> FlashInferAttention:
        """Like `over`, with the kernels that measure faster for the `typical` step; only reads
        the pool. fa2 is tried against fa3 only if decodes use fa2's kernel anyway, so that the
        trial does not have to build a kernel."""
        attention, layers = self.over(pool), self.layers(pool)
        if self.choice.prefill == "fa3" and self.choice.decode_on_tensor_cores:
            other = self.over(pool, replace(self.choice, prefill="fa2"))
            attention = faster_chunks([attention, other], layers, typical)
        choose_mixed(attention, layers, typical)
        return attention

    def fixed_decodes(
        self, pool: KvPool, max_sequences: int, max_blocks: int
    ) -> Callable[[int], FixedDecode]:
        """A factory of attention for a fixed number of decodes, for capture in graphs. All share
        buffers for `max_sequences` contexts with `max_blocks` blocks in total."""
        layers = self.layers(pool)
        buffers = DecodeBuffers(max_sequences, max_blocks, pool.device)

        def make(size: int) -> FixedDecode:
            return FixedDecode(layers, size, buffers, self._workspace, self.choice, self._library)

        return make

    def _built(
        self,
        choice: FlashInferChoice,
        device: torch.device,
        kv_dtype: torch.dtype,
        why_no_build: str,
    ) -> FlashInferChoice:
        """Run a decode and a chunk for each kind of layer, which builds and loads their kernels and
        shows that the card takes them. Returns `choice`, or with fa2. Raises
        FlashInferUnavailable."""
        layout = self._config.kv_layout("", _TRIAL_BLOCK, dtype_name(kv_dtype))
        layout = msgspec.structs.replace(layout, grouping=())
        pool = KvPool(layout, 1, device)
        layers = self.layers(pool)
        decode, chunk = Segment(1, 1, [0]), Segment(2, 2, [0])
        error = _build_error(self.over(pool, choice), layers, decode)
        if not error:
            error = _build_error(self.over(pool, choice), layers, chunk)
            if error and choice.prefill == "fa3":
                logger.warning(
                    "chunks by fa2, slower than fa3, whose kernels cannot be built or run: %s",
                    _with_cause(error, why_no_build),
                )
                choice = replace(choice, prefill="fa2")
                error = _build_error(self.over(pool, choice), layers, chunk)
        if error:
            why = _with_cause(error, why_no_build)
            raise FlashInferUnavailable(f"FlashInfer's kernels cannot be built or run: {why}")
        return choice


def _build_error(attention: FlashInferAttention, layers: PoolLayers, segment: Segment) -> str:
    """Plan and run a batch of one segment in a layer of each window; returns the error of a kernel
    that cannot be built or does not run on this card, or ""."""
    shape = (segment.query_len, layers.num_heads, layers.head_dim)
    try:
        attention.plan([segment])
        for window in set(layers.windows):
            q = torch.zeros(shape, dtype=layers.dtype, device=layers.device)
            attention.attend(layers.windows.index(window), q)
        wait_for(layers.device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        return first_error(str(error) or repr(error))
    return ""


def _with_cause(error: str, why_no_build: str) -> str:
    return f"{why_no_build} ({error})" if why_no_build else error


def _cuda_major() -> int | None:
    """The major version of the CUDA that torch was built for; None for a build for CPUs."""
    return int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None
