"""Each format of recorded traffic, made-up traffic, and files that are none."""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from simulator.traces.files import TraceOptions, read_trace
from simulator.traces.sessions import BlockRuns, Session, Trace, Turn

MOONCAKE = {"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
WITHOUT_IDS = {"timestamp": 0, "input_length": 70, "output_length": 4}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
HEADER = {"baton_trace": 1, "block_tokens": 64}
RECORDED = {"at_us": 5_000_000, "took_us": 1_000_000, "in": 130, "out": 3, "end": "finished"}
AGENT = {
    "id": "t", "requests": [
        {"t_s": 0.0, "in": 130, "out": 70, "think_s": 0.0, "api_s": 2.0, "blocks": [[1, 2]]},
        {"t_s": 4.0, "in": None, "out": None, "subagent": [
            {"t_s": 0.0, "in": 64, "out": 0, "think_s": 1.0, "blocks": [[90, 1]]}]},
        {"t_s": 9.0, "in": 260, "out": 7, "think_s": 5.0, "blocks": [[1, 4]]},
    ],
}  # fmt: skip


def trace_of(tmp_path: Path, text: str, **options: float) -> Trace:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(str(path), TraceOptions(**options))  # type: ignore[arg-type]


def lines(*values: object) -> str:
    return "".join(json.dumps(each) + "\n" for each in values)


def test_a_title_counts_time_from_the_first_arrival() -> None:
    sessions = [Session(name, start_s, [Turn(0.0, 8, 1)]) for name, start_s in (("a", 2), ("b", 5))]
    assert Trace("made up", sessions).title == "made up (2 requests, arrivals within 3.00 s)"


def test_a_title_says_when_sessions_begin() -> None:
    turns = [Turn(0.0, 8, 1), Turn(60.0, 8, 1)]
    sessions = [Session(name, start_s, turns) for name, start_s in (("a", 2), ("b", 5))]
    title = Trace("made up", sessions).title
    assert title == "made up (4 requests in 2 sessions, beginning within 3.00 s)"


def test_mooncake(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, lines(MOONCAKE, {**MOONCAKE, "timestamp": 0, "hash_ids": [0, 7]}))
    assert trace.block_tokens == 512
    first, second = trace.sessions
    assert 0 < first.start_s < 3, "requests of one time are spread"
    assert second.start_s == 3
    (turn,) = first.turns
    assert (turn.num_prompt, turn.num_output) == (1000, 5)
    one, other = (each.turns[0].blocks for each in trace.sessions)
    assert one is not None
    assert other is not None
    found, common = one.digests(512), other.digests(512)
    assert len(found) == len(common) == 2
    assert found[0] == common[0]
    assert found[1] != common[1]
    assert len(other.runs) == 1, "consecutive ids are one run"


def test_mooncake_without_ids_repeats_no_prompts(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, lines(WITHOUT_IDS, MOONCAKE))
    assert trace.block_tokens is None
    assert [each.turns[0].num_prompt for each in trace.sessions] == [70, 1000]
    assert [each.start_s for each in trace.sessions] == [pytest.approx(1.5, abs=1.5), 3]


def test_equal_blocks_have_equal_digests_and_others_none() -> None:
    one = BlockRuns(0, 512, ((0, 2),)).digests(128)
    other = BlockRuns(0, 512, ((0, 1), (7, 1))).digests(128)
    assert len(one) == len(other) == 8
    assert one[:4] == other[:4]
    assert not set(one[4:]) & set(other[4:])
    assert not set(one) & set(BlockRuns(1, 512, ((0, 2),)).digests(128))


def test_azure(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, AZURE + "2023-11-16 18:15:50.9951690,396,109\n", speed=2.0)
    assert trace.block_tokens is None
    first, second = trace.sessions
    assert first.start_s == 0
    assert second.start_s == pytest.approx((50.995169 - 46.68059) / 2)
    assert second.turns[0].num_prompt == 396


BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "7,GPT-4,1087,230,1317,API log\n5,ChatGPT,472,0,472,Conversation log\n5.0,ChatGPT,9,1,10,x\n"
)


def test_burstgpt_has_whole_seconds(tmp_path: Path) -> None:
    first, second, third = trace_of(tmp_path, BURST).sessions
    assert {first.turns[0].num_prompt, second.turns[0].num_prompt} == {472, 9}
    assert {first.turns[0].num_output, second.turns[0].num_output} == {1}
    assert first.start_s == 0 < second.start_s < 1
    assert 1 < third.start_s < 3
    assert third.turns[0].num_prompt == 1087
    assert trace_of(tmp_path, BURST) == trace_of(tmp_path, BURST)
    assert trace_of(tmp_path, BURST) != trace_of(tmp_path, BURST, seed=1)


TIMES = ["2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50.9951690"]


@pytest.mark.parametrize(
    "text",
    [
        f"TIMESTAMP,ContextTokens,GeneratedTokens\n{TIMES[1]},396,109\n{TIMES[0]},374,44\n",
        f"\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n{TIMES[0]},374,44\r\n{TIMES[1]},396,109",
        f"ContextTokens,GeneratedTokens,TIMESTAMP\n374,44,{TIMES[0]}\n396,109,{TIMES[1]}\n",
        '\ufeff"TIMESTAMP","x","ContextTokens","GeneratedTokens"\n'
        f'"{TIMES[0]}","a,b","374","44"\n"{TIMES[1]}","","396","109"\n',
        "\nTIMESTAMP, ContextTokens, GeneratedTokens\n\n"
        f"{TIMES[0]}+00:00, 374, 44\n{TIMES[1].replace(' 18:', 'T20:')}+02:00, 396, 109\n",
    ],
    ids=["unsorted", "BOM and CRLF", "other order", "quoted, one more", "blanks and zones"],
)
def test_azure_as_spreadsheets_write_it(tmp_path: Path, text: str) -> None:
    sessions = trace_of(tmp_path, text).sessions
    assert [each.start_s for each in sessions] == [0, pytest.approx(4.314579, abs=1e-6)]
    assert [(t.num_prompt, t.num_output) for each in sessions for t in each.turns] == [
        (374, 44),
        (396, 109),
    ]


def test_gzipped_files_are_read(tmp_path: Path) -> None:
    for text in (AZURE, lines(MOONCAKE)):
        plain = trace_of(tmp_path, text)
        (tmp_path / "trace").write_bytes(gzip.compress(text.encode()))
        assert read_trace(str(tmp_path / "trace"), TraceOptions()) == plain


def test_a_gzipped_file_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(gzip.compress(lines(MOONCAKE).encode())[:-12])
    with pytest.raises(ConfigError, match="ended before the end"):
        read_trace(str(tmp_path / "trace"), TraceOptions())


def test_a_trace_begins_with_its_first_request_whatever_its_clock(tmp_path: Path) -> None:
    epoch_ms = 1_700_000_000_000
    late = [{**MOONCAKE, "timestamp": epoch_ms + ms} for ms in (0, 2000)]
    early = [{**MOONCAKE, "timestamp": ms} for ms in (0, 2000)]
    shifted, plain = (trace_of(tmp_path, lines(*each)) for each in (late, early))
    assert shifted == plain


def test_outputs_of_no_tokens_count_as_one(tmp_path: Path) -> None:
    for text in (AZURE.replace(",44", ",0"), lines({**MOONCAKE, "output_length": 0})):
        assert trace_of(tmp_path, text).sessions[0].turns[0].num_output == 1


def test_hashes_of_64_bits_are_ids(tmp_path: Path) -> None:
    shared = (1 << 63) + 5
    rows = [{**MOONCAKE, "hash_ids": [shared, own]} for own in (shared + (1 << 32), -7)]
    rows.append({**MOONCAKE, "hash_ids": [0, 1]})
    one, other, small = (
        each.turns[0].blocks.digests(512)  # type: ignore[union-attr]
        for each in trace_of(tmp_path, lines(*rows)).sessions
    )
    assert one[0] == other[0]
    assert len({*one, *other}) == 3
    assert not {*one, *other} & {*small}


def test_pipes_and_devices_are_no_traces(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/null"):
        with pytest.raises(ConfigError, match="write the trace to a file first"):
            read_trace(name, TraceOptions())


def test_agents_are_closed_loops_with_subagents(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, lines(AGENT), span_s=100)
    (session,) = trace.sessions
    assert 0 <= session.start_s <= 100
    first, second = session.turns
    assert second.pause_s == 5.0
    assert first.blocks == BlockRuns(0, 64, ((1, 4),)), "the next prompt shows the output's blocks"
    (child,) = first.starts
    assert child.start_s == 2.0
    assert child.turns[0].num_output == 1
    assert trace.num_turns == 3


def test_a_recording_without_its_beginning_is_still_read(tmp_path: Path) -> None:
    one = {**RECORDED, "after": "b", "in": 200, "blocks": ["c"]}
    other = {**RECORDED, "after": "c", "in": 256, "blocks": ["d"], "at_us": 6_000_000}
    first, second = trace_of(tmp_path, lines(HEADER, one, other)).sessions
    assert second.start_s == 1.0
    assert first.turns[0].blocks == BlockRuns(0, 64, ((0, 3),))
    assert second.turns[0].blocks == BlockRuns(0, 64, ((0, 4),))


def test_recordings_of_several_routers_follow_each_other(tmp_path: Path) -> None:
    late = {**RECORDED, "blocks": ["a", "b"], "at_us": 9_000_000}
    early = {**RECORDED, "blocks": ["a", "x"]}
    first, second = trace_of(tmp_path, lines(HEADER, late, HEADER, early)).sessions
    assert (first.start_s, second.start_s) == (0.0, 4.0)
    assert first.turns[0].blocks == BlockRuns(0, 64, ((0, 1), (2, 1)))
    assert second.turns[0].blocks == BlockRuns(0, 64, ((0, 2),))


def test_a_prompt_that_was_rewritten_shows_no_output(tmp_path: Path) -> None:
    turns = [dict(AGENT["requests"][0]), {**AGENT["requests"][2], "blocks": [[1, 1], [50, 3]]}]  # type: ignore[index,dict-item]
    trace = trace_of(tmp_path, lines({"id": "t", "requests": turns}))
    assert trace.sessions[0].turns[0].blocks == BlockRuns(0, 64, ((1, 2),))


@pytest.mark.parametrize(
    "kind", ["poisson:shared=640", "bursts:burst=4,shared=640", "turns:turns=3"]
)
def test_made_up_traffic_has_its_means(kind: str) -> None:
    text = f"{kind},requests=3000,prompt=400,output=100,rate=10"
    trace = read_trace(text, TraceOptions())
    assert trace.num_turns >= 3000
    starts = [each.start_s for each in trace.sessions]
    assert all(a <= b for a, b in pairwise(starts))
    assert starts[-1] == pytest.approx(300, rel=0.15)
    outputs = [turn.num_output for each in trace.sessions for turn in each.turns]
    assert sum(outputs) / len(outputs) == pytest.approx(100, rel=0.1)


def test_made_up_conversations_repeat_what_was_said() -> None:
    trace = read_trace("turns:turns=5,requests=50", TraceOptions(seed=3))
    for session in trace.sessions:
        for turn, later in pairwise(session.turns):
            assert turn.blocks is not None
            assert later.blocks is not None
            said = turn.blocks.digests(64)
            assert said == later.blocks.digests(64)[: len(said)]


@pytest.mark.parametrize("kind", ["bursts:burst=4,shared=90", "turns:turns=3,shared=90"])
def test_made_up_prompts_repeat_by_blocks_of_the_given_size(kind: str) -> None:
    coarse, fine = (
        read_trace(f"{kind},requests=50", TraceOptions(block_tokens=size)) for size in (64, 16)
    )
    assert (coarse.block_tokens, fine.block_tokens) == (64, 16)
    for one, other in zip(coarse.sessions, fine.sessions, strict=True):
        for turn, same in zip(one.turns, other.turns, strict=True):
            assert turn.blocks is not None
            assert same.blocks is not None
            assert (turn.num_prompt, turn.num_output) == (same.num_prompt, same.num_output)
            of_output = same.num_output if kind.startswith("turns") else 0
            assert len(same.blocks.digests(16)) == (same.num_prompt + of_output) // 16
            assert len(turn.blocks.digests(16)) == (turn.num_prompt + of_output) // 64 * 4
            assert turn.blocks.runs[0][1] == 90 // 64
            assert same.blocks.runs[0][1] == 90 // 16


def test_equal_seeds_make_equal_traffic() -> None:
    one, same, other = (read_trace("poisson:", TraceOptions(seed=n)) for n in (1, 1, 2))
    assert one == same
    assert one != other


def test_a_limit_takes_the_first_ones(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, lines(MOONCAKE, MOONCAKE, MOONCAKE), limit=2)
    assert trace.num_turns == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no request"),
        ("hello\n", "unknown format"),
        ("{}\n", "unknown format"),
        ("[1]\n", "unknown format"),
        (lines(MOONCAKE) + "[1]\n", "line 2: it must hold a JSON object"),
        (lines(MOONCAKE) + "{\n", "line 2: not valid JSON"),
        (lines({**MOONCAKE, "input_length": -3}), "line 1: 'input_length' must be a whole number"),
        (lines({**MOONCAKE, "input_length": True}), "'input_length' must be a whole number"),
        (lines({**MOONCAKE, "output_length": 1e9}), "'output_length' must be a whole number"),
        (lines({**MOONCAKE, "timestamp": "x"}), "'timestamp' must be a number"),
        (lines(MOONCAKE, {**MOONCAKE, "hash_ids": [1]}), "one id for every 512 tokens"),
        (lines({**MOONCAKE, "hash_ids": [1 << 64, 2]}), "a list of whole numbers"),
        (lines({**MOONCAKE, "timestamp": 10**400}), "'timestamp' must be a number from 0 to 1e"),
        (lines({**MOONCAKE, "timestamp": float("nan")}), "'timestamp' must be a number"),
        ('{"hash_ids": \n', "line 1: not valid JSON"),
        ('{"hash_ids": [1]}\n', "'timestamp'"),
        (lines(MOONCAKE, WITHOUT_IDS), "line 2: 'hash_ids' is missing"),
        ("version https://git-lfs.example/spec/v1\nsize 132\n", "a pointer of Git LFS; fetch"),
        (AZURE + "x,1,2\n", "line 3: TIMESTAMP must be a time"),
        (AZURE + "2023-11-16 18:15:50,0,2\n", "line 3: ContextTokens must be a whole number"),
        (AZURE + f"2023-11-16 18:15:50,{'1' * 5000},2\n", "line 3: ContextTokens must be a whole"),
        (AZURE + f"2023-11-16 18:15:50,{'1' * 200_000},2\n", "line 3: not valid CSV: field larger"),
        (AZURE + "2023-11-16 18:15:50.5e9,1,2\n", "line 3: TIMESTAMP must be a time"),
        (AZURE + "2023-13-16 18:15:50,1,2\n", "line 3: TIMESTAMP must be a time"),
        (AZURE + "2023-11-16 18:15:50,1\n", "line 3: there must be 3 columns, not 2"),
        (BURST + "5.5,x,1,1,2,x\n", "line 5: Timestamp must be a whole number of seconds"),
        (BURST + "6,x,0,1,1,x\n", "line 5: Request tokens must be a whole number from 1"),
        (lines({"baton_trace": 2, "block_tokens": 64}), "'baton_trace' must be a whole number"),
        (lines(HEADER, {**RECORDED, "in": 0}), "line 2: 'in' must be a whole number from 1"),
        (lines(HEADER, {**RECORDED, "blocks": ["a"]}), "line 2: 'blocks' must be what 2 blocks"),
        (lines(HEADER, {**RECORDED, "blocks": ["a", "b", "c"]}), "'blocks' must be what 2 blocks"),
        (lines(HEADER, {**RECORDED, "blocks": [1, 2]}), "'blocks' must be a list of texts"),
        (
            lines(
                HEADER,
                {**RECORDED, "blocks": ["a", "b"]},
                {**RECORDED, "in": 256, "after": "b", "blocks": ["c"]},
            ),
            "line 3: 'after' must be the digest of a prompt's block number 3",
        ),
        (lines(HEADER, {**HEADER, "block_tokens": 96}), "'block_tokens' must be 64, as in"),
        (lines({"id": 3, "requests": []}), "'id' must be a text"),
        (lines({"id": "t", "requests": [1]}), "'requests' must be a list of objects"),
        (lines({"id": "t", "requests": [{"in": 3}]}), "requests 0: 'blocks' is missing"),
        (lines({"id": "t", "requests": [{"in": 3, "out": 1, "blocks": [[1]]}]}), "a list of pairs"),
    ],
)
def test_a_bad_file_is_one_line_that_says_where(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        trace_of(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/nowhere/trace", "No such file"),
        ("/", "it is a folder"),
        ("~nobody-of-this-name/x", "--trace ~nobody-of-this-name/x: there is no home folder"),
        ("poisson:rat=3", "'rat' is none"),
        ("poisson:rate=x", "rate must be a number from 1e-06"),
        ("poisson:rate=nan", "rate must be a number"),
        ("poisson:prompt=inf", "prompt must be a number"),
        ("poisson:requests", "requests must be a number"),
        ("turns:turns=0", "turns must be a number from 1 to"),
        ("bursts:burst=0.5", "burst must be a number from 1 to"),
    ],
)
def test_a_trace_that_cannot_be_read(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace(name, TraceOptions())


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xff\xfe\x00" * 100)
    with pytest.raises(ConfigError, match="unknown format"):
        read_trace(str(path), TraceOptions())
