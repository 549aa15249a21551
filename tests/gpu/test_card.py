"""FlashInfer and graphs on a card against torch's own attention; skipped where there is none.

Kernels are built at first use, which takes minutes. Bounds are those of bf16.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.gpu.card import random_model
from bench.tools.checkpoints import random_weights
from checkpoint.json_keys import JsonKeys
from engine.attention.base import AttentionBackend, Segment
from engine.attention.torch_attention import TorchAttention
from engine.checkpoint.config import parse_model_config
from engine.checkpoint.model_config import ModelConfig
from engine.device import bind_thread
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.gpu.flashinfer_backend import FlashInferBackend
from engine.gpu.fp8_format import MIN_CAPABILITY
from engine.gpu.fp8_linear import Fp8Linear, scaled_rows
from engine.gpu.graphs import CudaCapture, DecodeGraphs
from engine.kv_pool import KvPool
from engine.loader import load_engine
from engine.sampling.sample_row import SampleRow
from engine.sampling.sampler import Sampler
from protocol.sampling import SamplingParams
from scheduling.scheduler import SchedulerConfig
from tests.gpu.on_card import ON_CARD
from tests.sequences import greedy, sequence_of

pytestmark = ON_CARD

BLOCK_SIZE = 16
BF16_LOGITS = {"rtol": 0.02, "atol": 0.05}


def config_of(architecture: str, num_heads: int, window: int | None) -> ModelConfig:
    keys = {
        "architectures": [architecture],
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "sliding_window": window,
    }
    return parse_model_config(JsonKeys(keys, "test"))


@pytest.mark.parametrize(
    ("architecture", "num_heads", "window"),
    [
        ("LlamaForCausalLM", 4, None),  # groups of 2: decode on plain cores
        ("LlamaForCausalLM", 16, None),  # of 8: on tensor cores
        ("Qwen3ForCausalLM", 4, None),  # norms of q and k
        ("MistralForCausalLM", 4, 20),  # a sliding window
    ],
)
def test_chunks_mixed_steps_and_graphs_give_torchs_logits(architecture, num_heads, window):
    config, device = config_of(architecture, num_heads, window), torch.device("cuda:0")
    torch.manual_seed(0)
    backend = FlashInferBackend(config, device, torch.bfloat16, torch.bfloat16)
    model = random_model(config, backend)
    layout = config.kv_layout("test", BLOCK_SIZE, "bfloat16")
    pools = [KvPool(layout, 64, device) for _ in range(2)]
    make = backend.fixed_decodes(pools[0], 4, 64)
    graphs = DecodeGraphs(model, make, [2, 4], CudaCapture())
    for pool in pools:  # what lies beyond a context must never show
        pool.tensor.fill_(torch.nan)
    backends = (backend.attention(pools[0]), TorchAttention(pools[1], config.sliding_windows))
    tables = [[9, 3, 12, 5], [7, 1, 40, 8], [20, 21, 22, 23]]
    first = [(40, 0, tables[0]), (17, 0, tables[1])]
    mixed = [(1, 40, tables[0]), (1, 17, tables[1]), (33, 0, tables[2])]
    for parts in (first, mixed):
        ours, expected = (forward(model, attention, parts) for attention in backends)
        torch.testing.assert_close(ours, expected, **BF16_LOGITS)
    decodes = [(1, 41, tables[0]), (1, 18, tables[1]), (1, 33, tables[2])]
    expected = forward(model, backends[1], decodes)
    segments = [Segment(1, start + 1, table) for _, start, table in decodes]
    replayed = graphs.logits([5, 5, 5], [start for _, start, _ in decodes], segments)
    torch.testing.assert_close(replayed, expected, **BF16_LOGITS)


def forward(model, attention: AttentionBackend, parts) -> torch.Tensor:
    """Logits of all tokens; a part is (tokens, first position, block table), of token 5 each."""
    attention.plan([Segment(size, start + size, table) for size, start, table in parts])
    positions = [start + i for size, start, _ in parts for i in range(size)]
    ids = torch.full((len(positions),), 5, device="cuda:0")
    return model.forward(ids, torch.tensor(positions, device="cuda:0"), attention)


def test_products_in_fp8_are_those_of_the_emulation():
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        pytest.skip("the card does not multiply e4m3")
    torch.manual_seed(0)
    weight, x = (torch.randn(n, 512, device="cuda:0").bfloat16() for n in (768, 33))
    bias = torch.randn(768, device="cuda:0").bfloat16()
    for layer in (Fp8Linear(weight), Fp8Linear(weight, bias)):
        expected = layer._emulated(*scaled_rows(x))
        torch.testing.assert_close(layer(x), expected, rtol=0.02, atol=0.2)


CHECKPOINT = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # the bundled model's 32 are none of FlashInfer's
    "intermediate_size": 512,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "dtype": "bfloat16",
    "eos_token_id": 1,
}
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that FlashInfer serves, whose tokens depend on its attention."""
    made = tmp_path_factory.mktemp("checkpoint")
    (made / "config.json").write_text(json.dumps(CHECKPOINT))
    save_file(random_weights(CHECKPOINT, qk_norm=2.0), made / "model.safetensors", {"format": "pt"})
    return made


@pytest.fixture
def engine_on_card(folder: Path) -> MakeEngine:
    """Engines by FlashInfer in chunks of 32, with what else is said."""

    def make(**fields: object) -> Engine:
        config = EngineConfig(
            folder,
            SchedulerConfig(BLOCK_SIZE, max_batch_size=4, chunk_max_tokens=32),
            dtype="bfloat16",
            device="cuda:0",
            num_blocks=64,
            attention="kernel",
            **fields,
        )
        return load_engine(config, lambda: 0.0).engine

    return make


def tokens_of(engine: Engine, one_step_ahead: bool) -> list[int]:
    """Greedy tokens of a prompt in chunks of 32."""
    engine.run_ahead(int(one_step_ahead))
    sequence = sequence_of((7 + i % 300 for i in range(200)), greedy(16), BLOCK_SIZE)
    engine.scheduler.add(sequence)
    while engine.scheduler.has_work or engine.is_ahead:
        engine.run(engine.plan())
    assert engine.computed.is_done()
    return sequence.tokens[200:]


def test_chunks_that_run_ahead_give_the_same_tokens(engine_on_card):
    tokens = [tokens_of(engine_on_card(), ahead) for ahead in (True, False)]
    assert tokens[0] == tokens[1]


PARAMS = (
    greedy(24),
    SamplingParams(max_tokens=40, seed=1, temperature=1.0, top_p=0.9, logprobs=2),
    SamplingParams(max_tokens=30, seed=2, temperature=0.7, top_k=40, logit_bias={5: 1.0}),
    SamplingParams(max_tokens=40, seed=3, temperature=1.0, stop_token_ids=tuple(range(9, 200))),
)


def batch_on_card(engine: Engine) -> list[list[int]]:
    """What four prompts are continued with, which are decoded together."""
    sequences = [
        sequence_of(
            (7 + (3 * number + i) % 300 for i in range(20 + 9 * number)),
            params,
            BLOCK_SIZE,
            request_id=f"r{number}",
        )
        for number, params in enumerate(PARAMS)
    ]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while engine.scheduler.has_work or engine.is_ahead:
        engine.run(engine.plan())
    assert engine.scheduler.blocks.num_pinned == 0
    return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_one_step_ahead_gives_the_tokens_of_one_by_one(engine_on_card, cuda_graphs):
    """Both by fixed sizes of graphs: another batch may round otherwise."""
    engine = engine_on_card(cuda_graphs=cuda_graphs)
    expected = batch_on_card(engine)
    engine.scheduler.blocks.clear_cache()
    engine.run_ahead(1)
    tokens = batch_on_card(engine)
    assert tokens[0] == expected[0]
    same = sum(a == b for a, b in zip(tokens, expected, strict=True))
    assert same >= len(PARAMS) - 1


def test_a_step_is_launched_ahead_without_waiting_for_the_card(engine_on_card):
    """torch raises where an operation would wait."""
    engine = engine_on_card()
    launch, launched = engine._runner.launch_ahead, []

    def guarded(batch, before):
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched.append(launch(batch, before))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return launched[-1]

    engine._runner.launch_ahead = guarded
    batch_on_card(engine)  # what is made at first use may wait
    engine.scheduler.blocks.clear_cache()
    engine.run_ahead(1)
    batch_on_card(engine)
    assert launched


def test_top_p_on_a_card_cuts_where_sorting_does():
    logits = torch.randn((8, 50_000), device="cuda:0") * 3
    rows = [
        SampleRow(SamplingParams(max_tokens=9, seed=seed, temperature=1.0, top_p=0.9), 3)
        for seed in range(8)
    ]
    weights = torch.exp((logits - logits.amax(dim=-1, keepdim=True)).double())
    order = weights.argsort(dim=-1, descending=True)
    kept = weights.gather(-1, order).cumsum(dim=-1) <= 0.9001 * weights.sum(dim=-1, keepdim=True)
    for row, token in enumerate(Sampler(50_000).sample(logits, rows)):
        rank = int((order[row] == token.token_id).nonzero())
        assert rank <= int(kept[row].sum())


def test_a_checkpoint_is_served_in_fp8(engine_on_card):
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        pytest.skip("the card does not multiply e4m3")
    assert tokens_of(engine_on_card(weights="fp8", kv_dtype="fp8"), one_step_ahead=False)


def test_kv_in_fp8_gives_nearly_torchs_logits():
    config, device = config_of("LlamaForCausalLM", 4, None), torch.device("cuda:0")
    torch.manual_seed(0)
    backend = FlashInferBackend(config, device, torch.bfloat16, torch.float8_e4m3fn)
    model = random_model(config, backend)
    narrow, wide = (
        KvPool(config.kv_layout("test", BLOCK_SIZE, dtype), 64, device)
        for dtype in ("float8_e4m3fn", "bfloat16")
    )
    graphs = DecodeGraphs(model, backend.fixed_decodes(narrow, 2, 64), [2], CudaCapture())
    ours, theirs = backend.attention(narrow), TorchAttention(wide, config.sliding_windows)
    tables = [[9, 3, 12, 5], [7, 1, 40, 8]]
    for parts in (
        [(40, 0, tables[0]), (17, 0, tables[1])],
        [(1, 40, tables[0]), (20, 17, tables[1])],
    ):
        assert_near(forward(model, ours, parts), forward(model, theirs, parts))
    decodes = [(1, 41, tables[0]), (1, 37, tables[1])]
    segments = [Segment(1, start + 1, table) for _, start, table in decodes]
    replayed = graphs.logits([5, 5], [41, 37], segments)
    assert_near(replayed, forward(model, theirs, decodes))


def assert_near(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Within what e4m3 loses of keys and values, and far from another result."""
    assert (logits - expected).norm() / expected.norm() < 0.1


def test_a_checkpoint_is_served_with_graphs_and_a_profiled_pool(folder, caplog):
    fraction = 0.2
    config = EngineConfig(
        folder,
        SchedulerConfig(BLOCK_SIZE, max_batch_size=4),
        dtype="bfloat16",
        device="cuda:0",
        memory_fraction=fraction,
        attention="kernel",
    )
    with caplog.at_level("INFO"):
        loaded = load_engine(config, lambda: 0.0)
    loaded.engine.warm_up()
    for said in ("KV blocks", "captured 3 graphs", "mixed steps take", "MiB pinned"):
        assert said in caplog.text
    loaded.engine.scheduler.blocks.check()
    total = torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.memory_reserved(0) <= fraction * total


@pytest.mark.parametrize("window", [None, 20])
def test_a_mixed_step_by_one_call_gives_torchs_logits(window):
    config, device = config_of("MistralForCausalLM", 4, window), torch.device("cuda:0")
    torch.manual_seed(0)
    backend = FlashInferBackend(config, device, torch.bfloat16, torch.bfloat16)
    model = random_model(config, backend)
    layout = config.kv_layout("test", BLOCK_SIZE, "bfloat16")
    pools = [KvPool(layout, 64, device) for _ in range(2)]
    ours, theirs = backend.attention(pools[0]), TorchAttention(pools[1], config.sliding_windows)
    ours.joins_mixed = True
    tables = [[9, 3, 12, 5], [20, 21, 22, 23]]
    for parts in ([(40, 0, tables[0])], [(1, 40, tables[0]), (33, 0, tables[1])]):
        logits, expected = (forward(model, attention, parts) for attention in (ours, theirs))
        torch.testing.assert_close(logits, expected, **BF16_LOGITS)


def test_a_thread_has_the_card_that_it_was_bound_to():
    with ThreadPoolExecutor(1) as thread:
        thread.submit(bind_thread, torch.device("cuda:0")).result()
        assert thread.submit(torch.cuda.current_device).result() == 0
