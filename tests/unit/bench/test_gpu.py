"""bench.gpu's checks run small on a CPU, and its parts fail one at a time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu_ahead import Decodes, check_ahead, idle_share
from bench.gpu_checks import (
    BLOCK_SIZE,
    Card,
    Passes,
    Row,
    check_decode,
    check_graphs,
    check_overhead,
    check_prefill,
    random_model,
)
from bench.gpu_models import Load, _our_rate, check_logits
from bench.gpu_split import SplitLoad, check_split, handoff_of
from engine.attention.torch_backend import TorchAttention
from engine.config import parse_model_config
from engine.json_keys import JsonKeys
from engine.kv_pool import KvPool

DEMO_MODEL = Path(__file__).parents[3] / "demo_model"
CPU = torch.device("cpu")
SMALL = gpu.LLAMA_8B | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
}


@pytest.fixture
def passes() -> Passes:
    config = parse_model_config(JsonKeys(SMALL, "test"))
    model = random_model(config, CPU)
    pool = KvPool(config.kv_layout("test", BLOCK_SIZE, "bfloat16"), 16)
    attention = TorchAttention(pool, config.sliding_windows)

    def decode(tokens, positions, segments):
        attention.plan(segments)
        return model.forward(torch.tensor(tokens), torch.tensor(positions), attention)

    return Passes(model, pool, attention, decode)


def test_checks_give_shares_of_the_limits(passes):
    card = Card(CPU, copy_bytes_per_s=1e9, flops_per_s=1e9)
    fast = Card(CPU, copy_bytes_per_s=1e15, flops_per_s=1e15)
    for check in (
        lambda card: check_decode(card, passes, 3, 40),
        lambda card: check_decode(card, passes, 8, 40),  # more than the pool holds
        lambda card: check_prefill(card, passes, 50),
    ):
        assert 0 < check(fast).value < check(card).value
    assert check_overhead(card, passes, batch=2, context=33).value > 0
    assert check_graphs(card, passes, batch=2, context=33).value > 0


def test_steps_are_timed_one_by_one_and_one_ahead(passes, tmp_path):
    load = Decodes(batch=2, context=32, num_steps=3, num_traced=1)
    rows = list(check_ahead(Card(CPU, 1.0, 1.0), passes, load, tmp_path))
    assert [row.name.partition(": ")[2] for row in rows] == ["step, over one by one"] * 2
    assert all(row.value > 0 for row in rows)


def test_a_card_is_idle_between_what_a_trace_has_of_it():
    def event(cat, start, end):
        return {"cat": cat, "ts": start, "dur": end - start}

    events = [
        event("cpu_op", 0, 500),
        event("kernel", 130, 160),
        event("kernel", 100, 120),
        event("gpu_memcpy", 110, 140),  # beside both
        event("kernel", 180, 200),
        {"ph": "M", "ts": 0},
    ]
    assert idle_share(events) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="no event on a card"):
        idle_share(events[:1])


def test_logits_are_within_transformers_own_error():
    (row,) = check_logits(Card(CPU, 1.0, 1.0), DEMO_MODEL, "demo", length=100)
    assert 0 < row.value < 1.5, row.note


def test_throughput_is_that_of_all_requests():
    assert _our_rate(Card(CPU, 1.0, 1.0), DEMO_MODEL, Load(3, 20, 4)) > 0


def test_a_part_ends_at_its_limit_with_what_it_has():
    def hangs(device):
        yield Row("slow", "before", 1.0, "s")
        while True:
            time.sleep(0.01)

    rows = list(gpu.run_parts(["slow"], CPU, {"slow": hangs}, limit_s=0.05))
    assert [row.name for row in rows] == ["before", "PartOverran", "took"]


def test_a_part_that_fails_is_a_row_and_the_next_one_runs():
    def fails(device):
        yield Row("first", "before", 1.0, "s")
        raise RuntimeError("out of memory")

    def works(device):
        yield Row("second", "after", 2.0, "s")

    parts = {"first": fails, "second": works}
    rows = list(gpu.run_parts(["first", "second"], CPU, parts))
    assert [(row.part, row.name) for row in rows] == [
        ("first", "before"),
        ("first", "RuntimeError"),
        ("first", "took"),
        ("second", "after"),
        ("second", "took"),
    ]
    assert rows[1].unit == "failed"
    assert rows[1].note == "out of memory"
    assert gpu.table(rows).row_count == len(rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(capsys):
    assert gpu.main([]) == 1
    assert capsys.readouterr().err == "bench.gpu needs a CUDA card, and torch sees none\n"


def test_a_handoff_is_read_from_a_trace():
    writes = [(2000, 5000), (1000, 3000), (9000, 9500)]  # of which two overlap
    prefill = {
        "chunks": [[0, 4000, 64], [4000, 8000, 64]],
        "writes": [[post, done, 4, 0] for post, done in writes],
        "bytes_moved": 9000,
    }
    trace = {"handoff_ms": 2.5, "attempts": [{"prefill": {}}, {"prefill": prefill}]}
    handoff = handoff_of(trace)
    assert (handoff.ms, handoff.exposed_ms) == (2.5, 1.5)
    assert handoff.bytes_per_s == pytest.approx(9000 / 4.5e-3)


@pytest.mark.timeout(180)
def test_two_workers_on_one_device_give_one_workers_tokens():
    load = SplitLoad(num_prompt=150, num_requests=4, num_output=6, chunk=64)
    rows = {row.name: row for row in check_split("cpu", DEMO_MODEL, load)}
    assert rows["equal to one worker's"].value == 4
    assert rows["rate of writes, p50"].value > 0
    assert len(rows) == 4
