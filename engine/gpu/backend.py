"""The backend of a model on a CUDA card: torch's operations, which work for every model.

`engine.gpu.triton_backend` and the backends derived from it use faster kernels. All of them share
the weights of 16 or 8 bits, and the KV pool whose size comes from a profile run.
"""

from __future__ import annotations

import torch

from engine.attention.base import AttentionBackend
from engine.attention.groups import by_group
from engine.attention.torch_attention import TorchAttention
from engine.attention.torch_latents import TorchLatentAttention
from engine.backend import WHOLE, CapturedDecodes, FusedPass, Sizes
from engine.checkpoint.experts_config import ExpertsConfig
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.quantized_blocks import BlockMatrix, Matrix, as_tensor
from engine.device import dtype_name
from engine.gpu.fp8_linear import Fp8Linear, can_scale
from engine.gpu.memory import NO_GRAPHS, Graphs, LargestStep, blocks_for_card, profile, report_taken
from engine.gpu.stored_fp8 import stored_codes
from engine.kv_pool import KvPool
from engine.layers.embedding import TorchEmbedding
from engine.layers.experts import Experts, ExpertWeights, TorchExperts
from engine.layers.linear import LinearLayer, torch_linear
from engine.layers.ops import LayerOps, TorchOps
from engine.models.parts import ModelParts
from engine.models.runnable import RunnableModel
from engine.sampling.sampler import Sampler
from protocol.errors import ConfigError
from protocol.layout import TOKENS, KvLayout

_DEFAULT_FRACTION = 0.85
_FP8_BITS = 8


class CardBackend:
    """A `Backend` of torch's operations. With `weight_bits` 8, linear layers multiply in fp8 if the
    weight's shape allows it, except the logits layer; for a model with a mixture of experts this
    raises ConfigError."""

    shard = WHOLE
    keeps_blocks = False
    numerics = ""
    """Empty: results depend on the batch, so that they would differ in bits even between two
    workers with the same numerics."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        weight_bits: int = 16,
    ) -> None:
        self.device = device
        self.dtype, self.kv_dtype = dtype_name(dtype), dtype_name(kv_dtype or dtype)
        self.rounds_weights = weight_bits == _FP8_BITS
        if self.rounds_weights and config.experts is not None:
            raise ConfigError("weights fp8 has no product for mixtures of experts; use auto")
        self._config = config
        self._dtype = dtype

    def orders(self, layout: KvLayout) -> tuple[str, ...]:
        """See Backend."""
        return (TOKENS,)

    def keep_fp8(self) -> None:
        """From now on, weights that a checkpoint holds in fp8 are multiplied in fp8, without being
        dequantized; other weights are treated as before."""
        self.keeps_blocks, self.numerics = True, "fp8"

    def linear(self, weight: Matrix, bias: torch.Tensor | None) -> LinearLayer:
        """See Backend."""
        if not isinstance(weight, torch.Tensor):
            codes = stored_codes(weight, self.device)
            if codes is not None and can_scale(codes[0]):
                return Fp8Linear.of_codes(*codes, bias)
            weight = as_tensor(weight, self.device)
        if self.rounds_weights and can_scale(weight):
            return Fp8Linear(weight, bias)
        return torch_linear(weight, bias)

    def output_linear(self, weight: Matrix, bias: torch.Tensor | None) -> LinearLayer:
        """See Backend."""
        return self.linear(weight, bias)

    def experts(self, config: ExpertsConfig, weights: ExpertWeights) -> Experts:
        """See LayerFactory; one grouped product over all experts."""
        return TorchExperts(config, weights, self.linear)

    def logits_linear(self, weight: Matrix) -> LinearLayer:
        """See Backend."""
        return torch_linear(as_tensor(weight, self.device))

    def embedding(self, weight: torch.Tensor | BlockMatrix) -> TorchEmbedding:
        """See Backend."""
        assert isinstance(weight, torch.Tensor)
        return TorchEmbedding(weight)

    def ops(self) -> LayerOps:
        """See Backend."""
        return TorchOps(self._config.hidden_act, self._config.rms_norm_eps, self._dtype)

    def fuse(self, parts: ModelParts) -> FusedPass | None:
        """See Backend."""
        return None

    def attention(self, pool: KvPool) -> AttentionBackend:
        """See Backend."""
        return by_group(pool, self.over)

    def over(self, view: KvPool) -> AttentionBackend:
        """Attention over the layers of one group."""
        if self._config.latent is not None:
            return TorchLatentAttention(view, self._config.latent)
        return TorchAttention(view, self.windows(view), scoring=self._config.scoring)

    def windows(self, view: KvPool) -> list[int | None]:
        """The windows of the layers of one group."""
        return [self._config.sliding_windows[layer] for layer in view.model_layers]

    def tuned_attention(self, pool: KvPool, sizes: Sizes) -> AttentionBackend:
        """See Backend; nothing is tuned."""
        return self.attention(pool)

    def runnable(self, model: RunnableModel) -> RunnableModel:
        """See Backend."""
        return model

    def sampler(self) -> Sampler:
        """See Backend."""
        return Sampler(self._config.vocab_size)

    def captures(self, sizes: Sizes) -> bool:
        """See Backend; torch's attention is not captured."""
        return False

    def graphs(self, model: RunnableModel, pool: KvPool, sizes: Sizes) -> CapturedDecodes | None:
        """See Backend; torch's attention is not captured."""
        return None

    def planned_graphs(self, sizes: Sizes) -> Graphs:
        """How many graphs `graphs` will capture, and with how many window sizes; used to reserve
        memory."""
        return NO_GRAPHS

    def num_blocks(self, model: RunnableModel, layout: KvLayout, sizes: Sizes) -> int:
        """See Backend. Runs the largest step to measure its memory."""
        if sizes.num_blocks:
            return sizes.num_blocks
        num_tokens = min(sizes.max_chunk, sizes.context) + sizes.max_sequences
        largest, graphs = LargestStep(num_tokens, sizes.max_sequences), self.planned_graphs(sizes)
        memory = profile(model, layout, self.attention, largest, self.sampler(), graphs)
        fraction = (sizes.memory_fraction or _DEFAULT_FRACTION) / sizes.sharing
        fitting = blocks_for_card(layout, memory, fraction)
        return min(fitting, sizes.most_blocks(layout))

    def report(self, pool: KvPool) -> None:
        """See Backend."""
        report_taken(self.device, pool)
