"""The arithmetic of a server's figures, and what servers are told."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from bench.engine.comparison import _parse, _wanted
from bench.engine.served import decode_rate, num_tokens
from bench.engine.server_process import baton_command, vllm_command
from bench.engine.workloads import SWEEP, WORKS, EngineNeeds, Work, longest
from cli.up_settings import UpSettings
from process.settings import load_settings
from protocol.errors import BatonError

NEEDS = EngineNeeds(Path("/models/M"), "bfloat16", 2, 600, 32, 1000, 2**21, 2048)


def steady(begin: float, step_s: float, count: int, at_once: int = 1) -> list[tuple[float, int]]:
    return [(begin + step_s * i, at_once) for i in range(count)]


def test_one_stream_counts_between_its_first_and_last_token() -> None:
    assert decode_rate([steady(5.0, 0.1, 11)]) == pytest.approx(10.0)


def test_only_the_time_counts_in_which_all_streams_ran() -> None:
    slow_start = [(0.0, 1), (9.0, 1), *steady(10.0, 0.1, 40)]
    late = steady(10.0, 0.1, 20)
    assert decode_rate([slow_start, late]) == pytest.approx(20.0)
    assert decode_rate([late, slow_start]) == pytest.approx(20.0)


def test_tokens_of_a_step_that_come_after_each_other_bias_nothing() -> None:
    streams = [steady(0.004 * i, 0.1, 12) for i in range(8)]
    assert decode_rate(streams) == pytest.approx(80.0)


def test_tokens_that_come_together_all_count() -> None:
    assert decode_rate([steady(0.0, 0.2, 10, at_once=2)]) == pytest.approx(10.0)


@pytest.mark.parametrize("second", [steady(100.0, 0.1, 20), steady(1.5, 0.1, 20)])
def test_streams_that_hardly_met_have_no_rate(second: list[tuple[float, int]]) -> None:
    with pytest.raises(BatonError, match="2 streams ran side by side for too few"):
        decode_rate([steady(0.0, 0.1, 20), second])


@pytest.mark.parametrize(
    ("event", "count"),
    [
        ({"choices": [{"text": "ab", "token_ids": [4, 5]}]}, 2),
        ({"choices": [{"text": "", "token_ids": [], "finish_reason": "length"}]}, 0),
        ({"choices": [{"text": "", "token_ids": None}]}, 0),
        ({"choices": [], "usage": {"completion_tokens": 4}}, 0),
    ],
)
def test_tokens_of_an_event(event: dict, count: int) -> None:
    assert num_tokens(json.dumps(event).encode()) == count


def test_what_a_work_needs() -> None:
    assert longest(WORKS) == 2048 + 16 + 2
    assert longest(SWEEP, 64) == 8192 + 64 + 2
    assert Work("decode", 8, 512).num_tokens(16) == 8 * (34 + 1) * 16
    assert Work("decode", 8, 512).num_tokens(128, 64) == 8 * (5 + 1) * 128


def test_our_server_is_one_decode_worker_whose_prompts_go_first() -> None:
    command = baton_command(NEEDS)
    flags = command.command[command.command.index("up") + 1 :]
    up = load_settings(
        UpSettings, [*flags, "--port=1"], prog="p", description="d", section="up", environ={}
    )
    assert (up.prefill, up.decode, up.device, up.dtype) == (0, 1, "cpu", "bfloat16")
    assert (up.torch_threads, up.max_batch_size, up.chunk_max_tokens) == (2, 32, 2048)
    assert up.num_blocks is not None
    assert up.num_blocks * up.block_size >= NEEDS.num_tokens
    assert up.itl_target_ms >= 1000.0


def test_vllm_gets_cores_and_memory_for_the_same_work(tmp_path: Path) -> None:
    with pytest.raises(BatonError, match="has no vllm"):
        vllm_command(NEEDS, sys.executable)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 1.2.3\n")
    python.chmod(0o755)
    command = vllm_command(NEEDS, str(python))
    assert command.version == "vLLM 1.2.3"
    assert {"--max-model-len=600", "--max-num-seqs=32", "--dtype=bfloat16"} <= {*command.command}
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "2", "1000 tokens of 2 MiB, in GiB"


def test_what_servers_are_not_measured_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench.engine"])
    default = vars(_parse())

    def options(**given: object) -> argparse.Namespace:
        return argparse.Namespace(**default | {"served": True} | given)

    assert _wanted(options()) == "vllm"
    assert _wanted(options(peers="")) == ""
    assert _wanted(options(served=False)) == "transformers"
    for wrong in (
        {"peers": "transformers"},
        {"sweep": True},
        {"weights": "int8"},
        {"activations": "int8"},
        {"kv_order": "pairs"},
        {"block_size": "64"},
    ):
        with pytest.raises(BatonError, match="--served"):
            _wanted(options(**wrong))
