"""Traces whose prompts are lists of block ids: block sizes, equal blocks, and conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from protocol.errors import ConfigError
from simulator.traces.files import TraceOptions, read_trace
from simulator.traces.sessions import BlockRuns, Session, Trace, Turn
from tests.unit.simulator.fleets import served, small_fleet

ROW = {"timestamp": 0, "input_length": 1000, "output_length": 5}


def trace_of(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> Trace:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return read_trace(str(path), TraceOptions(**options))


def digests(trace: Trace, block_size: int) -> list[list[bytes]]:
    blocks = [turn.blocks for each in trace.sessions for turn in each.turns]
    return [each.digests(block_size) for each in blocks if each is not None]


@pytest.mark.parametrize(
    ("prompts", "size"),
    [
        ([(6758, 14), (2290, 5)], 512),
        ([(521, 33), (16, 1)], 16),
        ([(1000, 63), (1, 1)], 16),
        ([(100, 4)], 32),
        ([(300, 1), (40, 1)], 512),
        ([(700, 1)], 1024),
        ([(1, 1)], 512),
        ([(3, 3)], 1),
    ],
    ids=["Mooncake", "Bailian", "exact", "one line", "512 if it fits", "longer", "any", "tokens"],
)
def test_the_block_size_follows_from_all_prompts(
    tmp_path: Path, prompts: list[tuple[int, int]], size: int
) -> None:
    rows = [
        {**ROW, "input_length": num_tokens, "hash_ids": list(range(count))}
        for num_tokens, count in prompts
    ]
    assert trace_of(tmp_path, *rows).block_tokens == size
    assert trace_of(tmp_path, *rows[::-1]).block_tokens == size


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(1000, [0, 1]), (1025, [0, 1])], "line 2: 'hash_ids' must be one id for every 512 "),
        ([(1000, [0, 1]), (600, [0])], "line 2: 'hash_ids' must be one id for every 512 "),
        ([(1000, [0, 1]), (512, [0, 1])], "line 2: 'hash_ids' must be one id for every 512 "),
        ([(521, list(range(33))), (33, [0, 1])], "line 2: .* one id for every 16 tokens"),
        ([(10, list(range(7)))], "line 1: .* one id for every 1, 2, 4, ... or 4,096 tokens of"),
        ([(10, [])], "line 1: .* one id for every 1, 2, 4, ... or 4,096 tokens of the prompt"),
        ([(10_000, [1])], "line 1: .* one id for every 1, 2, 4, ... or 4,096 tokens of the prompt"),
    ],
)
def test_prompts_that_fit_no_common_block_size(
    tmp_path: Path, rows: list[tuple[int, list[int]]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        trace_of(tmp_path, *({**ROW, "input_length": n, "hash_ids": ids} for n, ids in rows))


def test_an_id_stands_for_its_block_behind_those_before_it(tmp_path: Path) -> None:
    prompts = [[1, 2, 3, 3], [1, 2, 3], [9, 2, 3], [2, 3, 3, 3]]
    rows = [{**ROW, "input_length": 512 * len(ids), "hash_ids": ids} for ids in prompts]
    first, prefix, *others = digests(trace_of(tmp_path, *rows), 512)
    assert len(set(first)) == 4, "equal ids within a prompt are different blocks"
    assert prefix == first[:3]
    for other in others:
        assert len(set(other)) == len(other)
        assert not set(other) & set(first)


def test_blocks_of_workers_may_be_longer_than_recorded_ones(tmp_path: Path) -> None:
    ids = [*range(100, 108)], [*range(100, 106), 7, 8, 9], [*range(100, 103)]
    rows = [{**ROW, "input_length": 16 * len(each), "hash_ids": each} for each in ids]
    one, other, short = digests(trace_of(tmp_path, *rows), 64)
    assert [len(one), len(other), len(short)] == [2, 2, 0]
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert [len(each) for each in digests(trace_of(tmp_path, *rows), 8)] == [16, 18, 6]


CHAT = {"timestamp": 61.0, "output_length": 20, "type": "text", "turn": 1}


def chat(number: int, parent: int, at_s: float, num_prompt: int, ids: list[int]) -> dict[str, Any]:
    return {
        **CHAT, "chat_id": number, "parent_chat_id": parent, "timestamp": at_s,
        "input_length": num_prompt, "hash_ids": ids,
    }  # fmt: skip


FIRST = chat(5, -1, 61.0, 40, [0, 1, 2])
NEXT = chat(9, 5, 70.5, 70, [0, 1, 3, 4, 5])


def test_conversations_are_sessions_at_their_recorded_times(tmp_path: Path) -> None:
    alone = chat(6, -1, 62.0, 16, [8])
    trace = trace_of(tmp_path, NEXT, alone, FIRST)
    assert trace.block_tokens == 16
    talk, single = trace.sessions
    assert [each.start_s for each in trace.sessions] == [0.0, 1.0]
    assert [turn.not_before_s for turn in talk.turns] == [0.0, 9.5]
    assert [turn.num_prompt for turn in single.turns] == [16]
    faster = trace.faster(2.0)
    assert [each.start_s for each in faster.sessions] == [0.0, 0.5]
    assert [turn.not_before_s for turn in faster.sessions[0].turns] == [0.0, 4.75]


@pytest.mark.parametrize("last_id", [2, 7])
def test_an_output_is_reused_only_by_a_prompt_that_can_contain_it(
    tmp_path: Path, last_id: int
) -> None:
    begin = {**FIRST, "hash_ids": [0, 1, last_id]}
    short = {**NEXT, "input_length": 59, "hash_ids": [0, 1, 3, 4]}
    for following, count in ((NEXT, 5), (short, 2)):
        first, second = trace_of(tmp_path, begin, following).sessions[0].turns
        assert first.blocks is not None
        assert second.blocks is not None
        found, prompt = first.blocks.digests(16), second.blocks.digests(16)
        assert len(found) == count, "without the last block, which the output completes"
        assert found[:2] == prompt[:2]


def test_requests_without_an_earlier_parent_of_their_own_begin_sessions(tmp_path: Path) -> None:
    again = chat(11, 5, 80.0, 48, [0, 1, 7])
    orphan = chat(12, 77, 81.0, 16, [8])
    of_a_later_one = chat(13, 14, 82.0, 16, [8])
    last = chat(14, 14, 83.0, 16, [8])
    trace = trace_of(tmp_path, FIRST, NEXT, again, orphan, of_a_later_one, last)
    assert [len(each.turns) for each in trace.sessions] == [2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parent_chat_id": "5"}, "'parent_chat_id' must be a whole number from -1"),
        ({"chat_id": -1}, "'chat_id' must be a whole number from 0"),
        ({"timestamp": "now"}, "'timestamp' must be a number"),
        ({"output_length": None}, "'output_length' must be a whole number from 0"),
    ],
)
def test_a_wrong_field_of_a_conversation(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"line 2: {words}"):
        trace_of(tmp_path, FIRST, {**NEXT, **changes})


def test_a_turn_waits_for_its_time_and_for_the_turn_before() -> None:
    turns = (
        Turn(0.0, 16, 4),
        Turn(0.0, 16, 40, not_before_s=5.0),
        Turn(0.0, 16, 4, not_before_s=5.001),
    )
    first, second, third = served(small_fleet(0, 1), Session("talk", 1.0, turns)).requests
    assert [first.arrival, second.arrival] == [1.0, 6.0]
    assert third.arrival == second.end > 6.001


def test_a_simulation_finds_the_blocks_of_a_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {**chat(0, -1, 0.0, 640, [*range(40)]), "output_length": 64},
        chat(1, 0, 30.0, 800, [*range(50)]),
    ]
    trace_of(tmp_path, *rows)
    command = ["simulate", "--model", "Llama-3-8B", "--colocated", "1", "--json"]
    assert main([*command, "--trace", str(tmp_path / "trace.jsonl")]) == 0
    (fleet,) = json.loads(capsys.readouterr().out)["fleets"]
    assert fleet["hit_share"] * 1440 == pytest.approx(640), "the last output token is not computed"


def test_blocks_of_other_spaces_differ_in_any_size() -> None:
    one, other = (BlockRuns(space, 16, ((0, 8),)).digests(32) for space in (1, 2))
    assert len(one) == 4
    assert not set(one) & set(other)
