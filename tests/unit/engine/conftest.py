"""Tiny random checkpoints in Hugging Face's format, and a model that runs them over a KV pool.

The weights are far from an initialisation's: logits span several units, norms are not 1 and biases
not 0, so that a difference of 1e-4 is small and every term that is left out shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.attention.base import Segment, wanted_rows
from engine.checkpoint.config import load_model_config
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import load_weights
from engine.cpu.backend import CpuBackend
from engine.kv_pool import KvPool
from engine.models.decoder import DecoderModel
from engine.native.library import KernelsUnavailable, load_library
from scheduling.states.step import StateStep
from tests.effort import NIGHTLY, with_one_each
from tests.unit.engine.native.instruction_sets import (
    instruction_sets_with_products,
    kernels_for,
    usable_instruction_sets,
)

BLOCK_SIZE = 4
VOCAB_SIZE = 97

_CLASSES = {
    "LlamaForCausalLM": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "MistralForCausalLM": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "Qwen2ForCausalLM": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "Qwen3ForCausalLM": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "MixtralForCausalLM": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "Qwen2MoeForCausalLM": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "Qwen3MoeForCausalLM": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "Dots1ForCausalLM": (transformers.Dots1Config, transformers.Dots1ForCausalLM),
    "DeepseekV2ForCausalLM": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "DeepseekV3ForCausalLM": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "SeedOssForCausalLM": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM),
    "Ministral3ForCausalLM": (transformers.Ministral3Config, transformers.Ministral3ForCausalLM),
    "InternLM3ForCausalLM": (transformers.InternLM3Config, transformers.LlamaForCausalLM),
    "GptOssForCausalLM": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "Gemma2ForCausalLM": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "Gemma3ForCausalLM": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "Qwen3NextForCausalLM": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    "Qwen3_5ForCausalLM": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "Qwen3_5MoeForCausalLM": (
        transformers.Qwen3_5MoeTextConfig,
        transformers.Qwen3_5MoeForCausalLM,
    ),
    "NemotronHForCausalLM": (transformers.NemotronHConfig, transformers.NemotronHForCausalLM),
    "IQuestCoderForCausalLM": (transformers.IQuestCoderConfig, transformers.LlamaForCausalLM),
}
_STRONG = {"sinks": 2.0, "gate_up_proj_bias": 4.0}
"""Parameters of gpt-oss that must be large to matter: so that activations reach their limits."""
_MIDDLES = {"A_log": -3.0}
"""Of parameters that are not around 0: states forget slowly."""
_NORMS_FROM_ZERO = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
_OWN_HEAD_DIM = _CLASSES.keys() - {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 9,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
    },
    "Gemma2ForCausalLM": {
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "Gemma3ForCausalLM": {
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        },
    },
}
"""Of architectures whose own defaults would hide what is left out."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attn_implementation": "eager",
}


INSTRUCTION_SETS = ("product_kernels", "instruction_set")
"""Parameters that name the kernels' instruction set."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everyday, each row of a table runs with one instruction set."""
    if not NIGHTLY:
        waiting = {id(item) for name in INSTRUCTION_SETS for item in with_one_each(items, name)}
        config.hook.pytest_deselected(items=[item for item in items if id(item) in waiting])
        items[:] = [item for item in items if id(item) not in waiting]


@dataclass
class Tiny:
    """A checkpoint in `folder` and the transformers model that it was saved from."""

    folder: Path
    reference: Any

    def expected_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """transformers' logits of the whole text at once, [N, vocab], fp32."""
        with torch.no_grad():
            return self.reference(torch.tensor([tokens])).logits[0].float()


MakeTiny = Callable[..., Tiny]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_tiny(tmp_path: Path) -> MakeTiny:
    """`make_tiny(architecture, dtype=..., shard_bytes=..., **config)` saves a checkpoint."""

    def make(
        architecture: str = "LlamaForCausalLM",
        dtype: torch.dtype = torch.float32,
        shard_bytes: int = 10**9,
        **overrides: Any,
    ) -> Tiny:
        config_class, model_class = _CLASSES[architecture]
        if architecture in _OWN_HEAD_DIM:
            overrides.setdefault("head_dim", 16)
        overrides = _DEFAULTS.get(architecture, {}) | overrides
        torch.manual_seed(1234)
        model = model_class(config_class(**(_SIZES | overrides))).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn_like(parameter)
                if "norm" in name:
                    is_from_zero = architecture in _NORMS_FROM_ZERO
                    middle = float(not is_from_zero or "linear_attn" in name)
                    parameter.copy_(middle + 0.3 * noise)
                else:
                    kind = name.rpartition(".")[2]
                    parameter.copy_(_MIDDLES.get(kind, 0.0) + _STRONG.get(kind, 0.2) * noise)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(0.3 * torch.randn_like(buffer))
        model = model.to(dtype)
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder, max_shard_size=shard_bytes)
        return Tiny(folder, model)

    return make


class _Slots:
    """Slots of the pool for the states of texts, by the text's first block. `cuts`, where set, are
    positions whose states the next steps store, too."""

    def __init__(self, free: Iterable[int] = ()) -> None:
        self._free = list(free)
        self.left: list[int] = []  # by the steps of this batch
        self._held: dict[int, int] = {}
        self.cuts: list[int] = []

    def step(self, text: int, start: int, length: int) -> StateStep | None:
        """The slots of a step of `length` tokens from `start`. None of them is handed out again
        before the next batch begins."""
        if not self._free:
            return None
        read = self._held.get(text) if start else None
        ends = [cut - start for cut in self.cuts if start < cut < start + length]
        writes = tuple((end, self._free.pop()) for end in [*ends, length])
        self._held[text] = writes[-1][1]
        self.left += ([] if read is None else [read]) + [slot for _, slot in writes[:-1]]
        return StateStep(start, read, writes)

    def begin(self) -> None:
        """A batch begins."""
        self._free, self.left = self._free + self.left, []


class PagedModel:
    """A checkpoint under test, with a pool whose unused memory holds NaN."""

    def __init__(
        self,
        folder: Path,
        num_blocks: int = 64,
        kernels: ctypes.CDLL | None = None,
        kv_dtype: str | None = None,
        config: ModelConfig | None = None,
    ) -> None:
        self.config = config or load_model_config(folder)
        backend = CpuBackend(self.config, self.config.dtype, kernels)
        self.model = DecoderModel(self.config, load_weights(folder, self.config), backend)
        layout = self.config.kv_layout("tiny", BLOCK_SIZE, kv_dtype or self.config.dtype)
        self._slots = _Slots()
        if layout.has_states:
            used = -(-num_blocks // layout.blocks_per_page(0))
            self._slots = _Slots(range(used, used + 32))
            num_blocks = (used + 32) * layout.blocks_per_page(0)
        self.pool = KvPool(layout, num_blocks)
        self.pool.tensor.fill_(torch.nan)
        self.attention = backend.attention(self.pool)

    def step(
        self,
        parts: Sequence[tuple[Sequence[int], int, Sequence[int]]],
        num_wanted: Sequence[int | None] | None = None,
    ) -> torch.Tensor:
        """Logits of the wanted tokens of one batch, the last so many of each part (None: of all);
        a part is (tokens, first position, block table)."""
        tokens, positions, segments = [], [], []
        self._slots.begin()
        for (part_tokens, first, table), count in zip(
            parts, num_wanted or [None] * len(parts), strict=True
        ):
            tokens += part_tokens
            positions += range(first, first + len(part_tokens))
            length, end = len(part_tokens), first + len(part_tokens)
            states = self._slots.step(table[0], first, length)
            segments.append(Segment(length, end, table, count, states=states))
        self.attention.plan(segments)
        wanted = wanted_rows(segments)
        rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
        hidden = self.model.hidden(
            torch.tensor(tokens), torch.tensor(positions), self.attention, rows
        )
        return self.model.logits(hidden)

    def in_chunks(self, tokens: Sequence[int], chunk: int, table: Sequence[int]) -> torch.Tensor:
        """Logits [N, vocab] of a text computed `chunk` tokens at a time."""
        return torch.cat(
            [
                self.step([(tokens[start : start + chunk], start, table)])
                for start in range(0, len(tokens), chunk)
            ]
        )


@pytest.fixture(scope="session")
def kernels() -> ctypes.CDLL:
    """Our C++ kernels, best for this machine; skips where they cannot be built."""
    try:
        return load_library()
    except KernelsUnavailable as error:
        pytest.skip(f"no kernels here: {error}")


@pytest.fixture(scope="session", params=instruction_sets_with_products() or [None])
def product_kernels(request: pytest.FixtureRequest, kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Our C++ kernels that have linear layers, of each kind that runs here, AMX's in software
    where need be; `kernels` says first whether any can be built."""
    if request.param is None:
        pytest.skip("this CPU has no bf16 products")
    return kernels_for(request.param)


@pytest.fixture(
    scope="session",
    params=[each for each in instruction_sets_with_products() if each != "avx2"] or [None],
)
def int8_kernels(request: pytest.FixtureRequest, kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Our C++ kernels that multiply integers, of each kind that runs here; AVX2 has none."""
    if request.param is None or not kernels_for(request.param).baton_has_int8():
        pytest.skip("these kernels multiply no integers on this CPU")
    return kernels_for(request.param)


@pytest.fixture(scope="session", params=usable_instruction_sets())
def instruction_set(request: pytest.FixtureRequest, kernels: ctypes.CDLL) -> str:
    """Each instruction set that this machine runs; `kernels` first skips the test if no kernels can
    be built."""
    name: str = request.param
    return name


@pytest.fixture
def paged_model() -> type[PagedModel]:
    """The class itself, so that tests name no path to it."""
    return PagedModel


@pytest.fixture
def text() -> Callable[[int], list[int]]:
    """`text(n)`: n token ids, the same in every run; a longer text begins with a shorter one."""

    def make(length: int) -> list[int]:
        generator = torch.Generator().manual_seed(7)
        return torch.randint(0, VOCAB_SIZE, (4096,), generator=generator).tolist()[:length]

    return make
