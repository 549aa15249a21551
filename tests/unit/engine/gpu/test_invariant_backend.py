"""The batch-invariant mode of a card, whole engines included, by a stand-in for its kernels; and
what it refuses."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine import loader
from engine.checkpoint.config import load_model_config
from engine.checkpoint.model_config import ModelConfig
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.gpu.choice import card_backend
from engine.gpu.invariant_backend import InvariantKernels
from engine.loader import load_engine
from protocol.errors import ConfigError
from protocol.sampling import PromptLogprobs, TokenLogprobs
from scheduling.scheduler import SchedulerConfig
from tests.paths import DEMO_MODEL
from tests.sequences import greedy, sequence_of
from tests.unit.engine.fake_invariant_kernels import KERNELS, StandIn, multiply

CPU, CARD = torch.device("cpu"), torch.device("cuda")
BLOCK_SIZE = 16


def config(chunk: int = 512, **fields: Any) -> EngineConfig:
    scheduler = SchedulerConfig(
        BLOCK_SIZE, max_batch_size=4, chunk_min_tokens=16, chunk_max_tokens=chunk
    )
    values = {"folder": DEMO_MODEL, "scheduler": scheduler, "device": "cpu", "num_blocks": 80}
    return EngineConfig(**{**values, "dtype": "bfloat16", "max_context": 1024, **fields})


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[InvariantKernels]:
    """Engines take the first of these kernels."""
    taken = [KERNELS]

    def backend(config: EngineConfig, model: ModelConfig, ranks: None) -> StandIn:
        return StandIn(model, CPU, torch.bfloat16, kernels=taken[0])

    monkeypatch.setattr(loader, "choose_backend", backend)
    return taken


def engine(chunk: int, **fields: Any) -> Engine:
    return load_engine(config(chunk, attention="torch", **fields), lambda: 0.0).engine


PROMPTS = [[(7 * i + 31 * n) % 1900 + 20 for i in range(n)] for n in (90, 33, 61)]
Text = list[tuple[int, TokenLogprobs | None]]


def texts(
    engine: Engine, prompts: list[list[int]], num_output: int = 5
) -> list[tuple[Text, PromptLogprobs | None]]:
    """The continuations, with the log-probabilities of 20 tokens at each place, and the prompts'
    log-probabilities."""
    found: dict[str, Text] = {}
    sequences = []
    for number, prompt in enumerate(prompts):
        params = greedy(num_output, logprobs=20, prompt_logprobs=2)
        name = f"r{number}"
        sequence = sequence_of(prompt, params, BLOCK_SIZE, request_id=name, root_hash=name.encode())
        sequences.append(sequence)
        engine.scheduler.add(sequence)
    while engine.scheduler.has_work:
        result = engine.run(engine.plan())
        for produced, logprobs in zip(result.produced, result.logprobs, strict=True):
            text = found.setdefault(produced.sequence.request_id, [])
            text.append((produced.token_id, logprobs))
    return [(found[each.request_id], each.take_prompt_logprobs()) for each in sequences]


def test_a_text_has_the_same_bits_alone_in_a_batch_and_in_other_chunks(kernels) -> None:
    [alone] = texts(engine(512), PROMPTS[:1])
    assert texts(engine(16), PROMPTS)[0] == alone  # chunks beside decodes
    assert texts(engine(48, cuda_graphs=False), PROMPTS[::-1])[-1] == alone


def test_a_product_whose_sums_depend_on_the_batch_is_found_out(kernels) -> None:
    def by_batch(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> None:
        order = torch.arange(x.shape[1]).roll(len(x))
        multiply(x[:, order], weight[:, order], *rest)

    kernels[0] = replace(KERNELS, multiply=by_batch)
    [alone] = texts(engine(512), PROMPTS[:1])
    assert texts(engine(16), PROMPTS)[0] != alone


def test_log_probabilities_are_totalled_by_the_modes_kernel(kernels) -> None:
    totalled = []

    def log_totals(logits: torch.Tensor) -> torch.Tensor:
        totalled.append(len(logits))
        return KERNELS.log_totals(logits) + 1.0

    kernels[0] = replace(KERNELS, log_totals=log_totals)
    [(changed, of_prompt)] = texts(engine(512), PROMPTS[:1])
    kernels[0] = KERNELS
    [(text, _)] = texts(engine(512), PROMPTS[:1])
    assert totalled == [len(PROMPTS[0]) - 1, 1, 1, 1, 1, 1]
    assert of_prompt is not None
    for (_, moved), (_, expected) in zip(changed, text, strict=True):
        assert moved is not None
        assert expected is not None
        assert moved.logprob == pytest.approx(expected.logprob - 1.0)


def test_workers_must_agree_on_the_mode_to_hand_over(kernels) -> None:
    ours = engine(512).layout
    kernels[0] = replace(KERNELS, numerics="")
    theirs = engine(512).layout
    assert ours.model_fingerprint == f"{theirs.model_fingerprint}-{KERNELS.numerics}"
    assert ours.fingerprint != theirs.fingerprint


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"attention": "kernel"}, "attention is 'kernel', but on a card FlashInfer's"),
        ({"attention": "torch"}, "attention is 'torch', but on a card torch's"),
        ({"weights": "fp8"}, "weights is 'fp8', but its products"),
    ],
)
def test_settings_that_depend_on_the_batch_are_refused_on_a_card(field, message) -> None:
    asked = config(device="cuda", batch_invariant=True, **field)
    with pytest.raises(ConfigError, match=message) as raised:
        card_backend(asked, load_model_config(DEMO_MODEL), CARD, "bfloat16")
    assert "use auto" in str(raised.value)


def test_models_that_the_kernels_do_not_take_are_refused() -> None:
    model = load_model_config(DEMO_MODEL)
    with pytest.raises(ConfigError, match="needs dtype bfloat16 or float16"):
        StandIn(model, CPU, torch.float32, kernels=KERNELS)
    model = replace(model, head_dim=80)
    with pytest.raises(ConfigError, match=r"takes heads of .* not of 80"):
        StandIn(model, CPU, torch.bfloat16, kernels=KERNELS)


def test_cards_that_cannot_compute_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for capability, message in (((7, 5), "8.0 or more, not 7.5"), ((9, 0), "needs Triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        with pytest.raises(ConfigError, match=message):
            InvariantKernels.on(CARD)


def test_the_name_of_the_results_tells_the_card_and_the_versions(monkeypatch) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    numerics = InvariantKernels.on(CARD).numerics
    assert numerics.startswith(f"invariant1-card9.0-triton{triton.__version__}-torch2.")


def test_a_cpu_needs_our_own_kernels_and_changes_nothing() -> None:
    for fields in ({"dtype": "float32"}, {"attention": "torch"}):
        with pytest.raises(ConfigError, match="on a CPU needs our own kernels"):
            load_engine(config(batch_invariant=True, **fields), lambda: 0.0)
    try:
        changed = load_engine(config(batch_invariant=True, attention="kernel"), lambda: 0.0)
    except ConfigError as error:
        pytest.skip(f"not on this CPU: {error}")
    same = load_engine(config(attention="kernel"), lambda: 0.0)
    assert changed.engine.layout == same.engine.layout
