"""bench.gpu's checks run small on a CPU, and its parts fail one at a time."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace

import pytest
import torch

from bench.gpu import fleets as gpu_fleets
from bench.gpu import models as gpu_models
from bench.gpu import parts as gpu_parts
from bench.gpu import runner as gpu
from bench.gpu.card import (
    BLOCK_SIZE,
    Card,
    CardUse,
    Passes,
    Row,
    check_decode,
    check_graphs,
    check_overhead,
    check_prefill,
    describe_machine,
    memory_rows,
    random_model,
)
from bench.gpu.fleets import FleetLoad, SplitLoad, check_share, check_split, fleet_rows, handoff_of
from bench.gpu.models import (
    Load,
    Prompts,
    Reference,
    _our_rate,
    check_exactness,
    check_logits,
    first_difference,
)
from bench.gpu.numerics import check_error, check_gain
from bench.gpu.runner import run_apart
from bench.gpu.steps import (
    Decodes,
    Prefills,
    check_ahead,
    check_mixed,
    check_overlap,
    check_prefill_ahead,
    idle_share,
)
from bench.interference import Contestant, Result
from bench.tools.stream_load import Phase
from checkpoint.json_keys import JsonKeys
from engine.attention.flashinfer_attention import FlashInferAttention, FlashInferChoice
from engine.attention.torch_attention import TorchAttention
from engine.checkpoint.config import parse_model_config
from engine.gpu.backend import CardBackend
from engine.gpu.tuning import MixedStep
from engine.kv_pool import KvPool
from tests.paths import DEMO_MODEL, ROOT
from tests.unit.engine.attention import fake_flashinfer
from tests.unit.engine.attention.torch_pool_layers import TorchPoolLayers

CPU = torch.device("cpu")
SMALL = gpu_parts.LLAMA_8B | {
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
    model = random_model(config, CardBackend(config, CPU, torch.bfloat16))
    pool = KvPool(config.kv_layout("test", BLOCK_SIZE, "bfloat16"), 32)
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
        lambda card: check_decode(card, passes, 16, 40),  # more than the pool holds
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


def test_prompts_are_timed_one_by_one_and_one_ahead(passes, tmp_path):
    load = Prefills(length=33, num_prompts=3, num_traced=1)
    (row,) = check_prefill_ahead(Card(CPU, 1.0, 1.0), passes, load, tmp_path)
    assert row.name == "prompts of 33, one a step: step, over one by one"
    assert row.value > 0


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


def test_weights_in_fp8_move_logits_further_than_bf16():
    rows = list(check_error(Card(CPU, 1.0, 1.0), DEMO_MODEL, "demo", 60, KINDS))
    assert [row.name for row in rows] == ["demo: weights: error over bf16's"]
    assert rows[0].value > 1.0


KINDS = (("weights", 8, "bfloat16"),)


def test_gains_are_times_over_times(passes):
    rows = list(check_gain(Card(CPU, 1.0, 1.0), passes, passes, ((1, 40),), chunk=50))
    assert [row.name.partition(":")[0] for row in rows] == ["batch 1 at 40", "chunk of 50"]
    assert all(row.value > 0 for row in rows)


def test_a_copy_beside_a_chunk_is_measured(passes):
    rows = list(check_overlap(Card(CPU, 1.0, 1.0), passes, 50))
    assert [row.unit for row in rows] == ["% of copy", "% of chunk"]


def test_mixed_steps_are_measured_both_ways(passes):
    layers = TorchPoolLayers(passes.pool, (None, None), 4, torch.bfloat16)
    workspace = torch.zeros(16, dtype=torch.uint8)
    choice = FlashInferChoice("fa2", decode_on_tensor_cores=True)
    attention = FlashInferAttention(layers, workspace, choice, fake_flashinfer)
    (row,) = check_mixed(attention, layers, [MixedStep(3, 20, 18)])
    assert row.name == "3 decodes of 20 beside a chunk of 18: two calls over one"
    assert attention.joins_mixed == (row.value > 1)


def test_memory_is_held_against_its_fraction():
    (row,) = memory_rows(CardUse(total=1000, before=100, after=500), 0.5)
    assert (row.value, row.goal) == (80.0, "<= 100")


def test_ways_of_computing_are_compared_with_transformers_and_each_other(monkeypatch):
    ways = tuple(way for way in gpu_models.WAYS if way.label in ("torch", "eager", "graphs"))
    monkeypatch.setattr(gpu_models, "WAYS", ways)
    rows = list(check_exactness(Card(CPU, 1.0, 1.0), DEMO_MODEL, "demo", Prompts((20, 40), 4)))
    counts = [row for row in rows if row.name.endswith("equal tokens")]
    assert [row.name.partition(":")[0] for row in counts] == [
        "demo torch",
        "demo eager",
        "demo graphs",
        "demo graphs beside eager",
    ]
    assert all(row.goal == "= 8, or explained" for row in counts)
    assert counts[-1].value == 8  # a CPU has no graphs: they are the same
    assert all(row.value < 6 for row in rows if row.unit == "bf16 errors")


def test_a_divergence_is_explained_by_how_near_its_tokens_are():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    reference = Reference(Card(CPU, 1.0, 1.0), DEMO_MODEL, [list(range(10, 40))])
    assert reference.distance(0, [5, 6], (7, 7)) == 0.0
    assert reference.distance(0, [5, 6], (7, 8)) > 0.0


def test_a_fleet_is_reported_by_what_its_streams_saw():
    quiet = Phase(10.0, gaps_s=[0.002] * 50)
    disturbed = Phase(10.0, [0.004] * 50, [0.3] * 4, stream_tokens=500, prompt_tokens=1000)
    rows = {
        row.name: row
        for row in fleet_rows(
            "share", Result(Contestant("c", "apart", 1, ()), [(quiet, disturbed)])
        )
    }
    assert rows["apart: between tokens, p99"].value == pytest.approx(4.0)
    assert rows["apart: p99 over undisturbed"].value == pytest.approx(2.0)
    assert rows["apart: first token of a long prompt, p99"].value == pytest.approx(300.0)
    assert rows["apart: streams"].value == 50.0


def test_shares_of_a_card_are_skipped_where_there_is_no_daemon(monkeypatch):
    monkeypatch.setenv("PATH", "")
    (row,) = check_share("cuda:0", DEMO_MODEL, FleetLoad())
    assert row.unit == "skipped"


def test_shares_of_a_card_begin_without_a_daemon_and_end_with_it(monkeypatch, tmp_path):
    """A daemon that only writes down what it is told; fleets that only say what they were given."""
    told = tmp_path / "told"
    daemon = tmp_path / "nvidia-cuda-mps-control"
    daemon.write_text(f'#!/bin/sh\necho "$1 ${{CUDA_MPS_PIPE_DIRECTORY:+pipes}}" >> {told}\n')
    daemon.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    ran = []

    def run(contestant, model, load, seconds):
        has_mps = "CUDA_MPS_PIPE_DIRECTORY" in gpu_fleets.os.environ
        ran.append((contestant.label, has_mps, "--sm-fraction=0.5" in contestant.flags))
        phase = Phase(1.0, gaps_s=[0.001], ttft_s=[0.1])
        return phase, phase

    monkeypatch.setattr(gpu_fleets, "run_contestant", run)
    assert len(list(check_share("cuda:0", DEMO_MODEL, FleetLoad()))) == 15
    assert ran == [
        ("apart, without MPS", False, False),
        ("apart, MPS", True, False),
        ("apart, MPS, half each", True, True),
    ]
    assert told.read_text() == "-d pipes\n pipes\n"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in gpu_fleets.os.environ


def test_throughput_is_that_of_all_requests():
    assert _our_rate(Card(CPU, 1.0, 1.0), DEMO_MODEL, Load(3, 20, 4)) > 0


def test_a_part_ends_at_its_limit_with_what_it_has(capsys):
    def hangs(device):
        yield Row("slow", "before", 1.0, "s")
        while True:
            time.sleep(0.01)

    rows = list(gpu.run_part("slow", CPU, hangs, limit_s=1.0))
    assert [row.name for row in rows] == ["before", "PartOverran", "took"]
    assert "in hangs" in capsys.readouterr().err


def test_a_part_that_fails_is_a_row_that_says_where(capsys):
    def fails(device):
        yield Row("first", "before", 1.0, "s")
        raise RuntimeError("out of memory")

    rows = list(gpu.run_part("first", CPU, fails))
    assert [(row.part, row.name) for row in rows] == [
        ("first", "before"),
        ("first", "RuntimeError"),
        ("first", "took"),
    ]
    assert rows[1].unit == "failed"
    assert rows[1].note.startswith("out of memory (test_runner.py:")
    assert gpu.table(rows).row_count == len(rows)
    assert "out of memory" in capsys.readouterr().err


PROCESSES = {
    "works": ("pass", ""),
    "exits": (
        "import sys; print('\\nwhy', file=sys.stderr); sys.exit(3)",
        "exited with status 3: why",
    ),
    "dies": ("import os; os.kill(os.getpid(), 11)", "died of SIGSEGV: "),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_that_dies_says_how(tmp_path, name):
    code, said = PROCESSES[name]
    assert run_apart([sys.executable, "-c", code], tmp_path / "log", limit_s=60.0) == said


def test_a_process_that_hangs_is_killed_with_its_children(tmp_path):
    """The child holds the write end of a pipe, which ends with it."""
    code = (
        "import subprocess, sys, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print('began', file=sys.stderr, flush=True)\n"
        "child.wait()"
    )
    said = run_apart([sys.executable, "-c", code], tmp_path / "log", limit_s=1.0)
    assert said.startswith("did not end itself and was killed after 1 s")


def test_parts_run_apart_and_a_process_that_dies_is_a_row(tmp_path, monkeypatch, capsys):
    output = tmp_path / "rows.jsonl"
    kept = Row("limits", "kept", 1.0, "s")
    output.write_text(json.dumps(asdict(replace(kept, name="of an earlier run"))) + "\n")
    commands = []

    def fake_run(command, log, limit_s):
        commands.append(command[2:])
        has_died = "--part=build" in command
        with output.open("a") as file:
            file.write(json.dumps(asdict(kept)) + "\n" + '{"part": "bui' * has_died)
        return "died of SIGSEGV: illegal address" if has_died else ""

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "run_apart", fake_run)
    assert gpu.main(["--part=limits", "--part=build", f"--output={output}"]) == 1
    assert [command[:3] for command in commands] == [
        ["bench.gpu", "--here", "--part=limits"],
        ["bench.gpu", "--here", "--part=build"],
    ]
    rows = gpu.read_rows(output)
    assert [row.name for row in rows] == ["of an earlier run", "kept", "kept", "process"]
    failed = rows[-1]
    assert (failed.part, failed.unit) == ("build", "failed")
    assert failed.note == "died of SIGSEGV: illegal address"
    assert "of an earlier run" not in capsys.readouterr().out


def test_every_part_has_rows_in_the_document():
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert [name for name in gpu_parts.PARTS if f"| `{name}` |" not in text] == []


def test_the_machine_is_described(monkeypatch, tmp_path):
    class Properties:
        name, major, minor, multi_processor_count, total_memory = "card", 9, 0, 132, 1 << 37

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    card, packages, tools, builds = describe_machine(torch.device("cuda:0"))
    assert card.note.startswith("card, compute capability 9.0, 132 multiprocessors, driver ")
    assert f"torch {torch.__version__}" in packages.note
    assert tools.goal == "= 0"
    assert (builds.value, builds.goal) == (1, "= 0")
    assert f"CUDA_HOME is {tmp_path}" in builds.note


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


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_two_workers_on_one_device_give_one_workers_tokens():
    card = Card(CPU, copy_bytes_per_s=1e10, flops_per_s=1.0)
    load = SplitLoad(num_prompt=150, num_requests=4, num_output=6, chunk=64)
    rows = {row.name: row for row in check_split(card, DEMO_MODEL, load)}
    assert rows["equal to one worker's"].value == 4
    rate = rows["rate of writes, p50"].value
    assert rate > 0
    share = rows["writes, of what a copy on the card moves"].value
    assert share == pytest.approx(100 * 2 * rate * 1e9 / 1e10)
    assert len(rows) == 5
