"""Which kernels a card's backend takes if some cannot be built; with FlashInfer's stand-in."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import pytest
import torch

from checkpoint.json_keys import JsonKeys
from engine.attention.flashinfer_attention import FlashInferUnavailable
from engine.backend import Sizes
from engine.checkpoint.config import parse_model_config
from engine.gpu.backend import CardBackend
from engine.gpu.flashinfer_backend import FlashInferBackend, FlashInferLibrary
from engine.gpu.memory import CardMemory
from protocol.layout import KvLayout
from tests.unit.engine.attention import fake_flashinfer

KEYS = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "sliding_window": 20,
}
NINJA = """Ninja build failed. Ninja output:
ninja: Entering directory `/root/.cache/flashinfer'
[1/9] nvcc -c batch_prefill.cu -o batch_prefill.cuda.o
batch_prefill.cuh:3:10: fatal error: curand_kernel.h: No such file or directory
ninja: build stopped: subcommand failed.
"""
MISSING = "fatal error: curand_kernel.h: No such file or directory"


class Builds:
    """A library whose plans build kernels: those of `broken` fail, those of `foreign` do not run.
    Counts what is planned."""

    def __init__(
        self, *broken: str, foreign: tuple[str, ...] = (), error: Exception | None = None
    ) -> None:
        self.planned: list[str] = []
        self._broken = broken
        self._foreign = foreign
        self._error = error or RuntimeError(NINJA)

    def library(self) -> ModuleType:
        module = ModuleType("flashinfer")
        module.__version__ = "0"

        class Decode(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
            def plan(wrapper, *args: Any, **kwargs: Any) -> None:
                self._build("decode")
                super().plan(*args, **kwargs)

        class Prefill(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
            def __init__(wrapper, *args: Any, backend: str) -> None:
                super().__init__(*args, backend=backend)
                wrapper.backend = backend

            def plan(wrapper, *args: Any, **kwargs: Any) -> None:
                self._build(wrapper.backend)
                super().plan(*args, **kwargs)

            def run(wrapper, *args: Any, **kwargs: Any) -> torch.Tensor:
                if wrapper.backend in self._foreign:
                    raise RuntimeError("CUDA error: no kernel image is available for the device")
                return super().run(*args, **kwargs)

        module.BatchDecodeWithPagedKVCacheWrapper = Decode
        module.BatchPrefillWithPagedKVCacheWrapper = Prefill
        return module

    def _build(self, kind: str) -> None:
        self.planned.append(kind)
        if kind in self._broken:
            raise self._error


def backend(
    builds: Builds, is_hopper: bool = True, why_no_build: str = "", window: int | None = 20
) -> FlashInferBackend:
    config = parse_model_config(JsonKeys(KEYS | {"sliding_window": window}, "test"))
    library = FlashInferLibrary(builds.library(), is_hopper, 132, why_no_build)
    dtype = torch.bfloat16
    return FlashInferBackend(config, torch.device("cpu"), dtype, dtype, 4, library=library)


@pytest.mark.parametrize(("is_hopper", "prefill"), [(True, "fa3"), (False, "fa2")])
def test_kernels_are_built_before_weights_are_loaded(is_hopper: bool, prefill: str) -> None:
    builds = Builds()
    assert backend(builds, is_hopper).choice.prefill == prefill
    assert builds.planned == ["decode", prefill]


def test_hopper_takes_fa2_where_fa3_cannot_be_built(caplog: pytest.LogCaptureFixture) -> None:
    builds = Builds("fa3")
    with caplog.at_level(logging.WARNING):
        assert backend(builds).choice.prefill == "fa2"
    assert builds.planned == ["decode", "fa3", "fa2"]
    [line] = caplog.messages
    assert "by fa2" in line
    assert line.endswith(f"batch_prefill.cuh:3:10: {MISSING}")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("broken", "is_hopper"), [(("decode",), True), (("fa2",), False), (("fa2", "fa3"), True)]
)
def test_kernels_that_cannot_be_built_are_as_if_flashinfer_were_not_there(
    broken: tuple[str, ...], is_hopper: bool
) -> None:
    with pytest.raises(FlashInferUnavailable, match=f"cannot be built or run: .*{MISSING}"):
        backend(Builds(*broken), is_hopper)


@pytest.mark.parametrize(
    "error", [FileNotFoundError("no ninja"), ImportError("no module"), RuntimeError("")]
)
def test_any_failure_of_a_build_is_told(error: Exception) -> None:
    with pytest.raises(FlashInferUnavailable, match=r"cannot be built or run: .+"):
        backend(Builds("decode", error=error))


def test_what_the_machine_lacks_is_told_first() -> None:
    with pytest.raises(
        FlashInferUnavailable, match=r"built or run: there is no CUDA compiler \(.*curand"
    ):
        backend(Builds("fa2"), is_hopper=False, why_no_build="there is no CUDA compiler")


def test_a_full_card_is_no_missing_kernel() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        backend(Builds("decode", error=torch.OutOfMemoryError("full")))


def test_kernels_for_another_card_are_replaced_or_told() -> None:
    assert backend(Builds(foreign=("fa3",))).choice.prefill == "fa2"
    with pytest.raises(FlashInferUnavailable, match="no kernel image"):
        backend(Builds(foreign=("fa2", "fa3")))


@pytest.mark.parametrize(("sharing", "fraction"), [(1, 0.8), (2, 0.4)])
def test_ranks_that_share_a_card_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, sharing: int, fraction: float
) -> None:
    asked: list[float] = []

    def fitting(layout: KvLayout, memory: CardMemory, part: float) -> int:
        asked.append(part)
        return 7

    card = "engine.gpu.backend"
    monkeypatch.setattr(f"{card}.profile", lambda *arguments: CardMemory(1, 1, 0, 0, 0))
    monkeypatch.setattr(f"{card}.blocks_for_card", fitting)
    config = parse_model_config(JsonKeys(KEYS, "test"))
    own = CardBackend(config, torch.device("cpu"), torch.bfloat16)
    layout = config.kv_layout("m", 16, "bfloat16")
    sizes = Sizes(4, 64, 128, memory_fraction=0.8, sharing=sharing)
    assert own.num_blocks(None, layout, sizes) == 7
    assert asked == [fraction]
