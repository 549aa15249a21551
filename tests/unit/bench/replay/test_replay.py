"""Replays: prompts of the recorded sizes and prefixes, and sessions in a closed loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from bench.replay.__main__ import main
from bench.replay.player import Manner, Player
from bench.replay.prompts import Conversation, continues
from bench.replay.smaller_traces import shrunk
from bench.replay.vocabulary import Target, Vocabulary
from simulator.traces.sessions import BlockRuns, Session, Trace, Turn

WORDS = Vocabulary(tuple(f"w{n}" for n in range(50)), tuple(range(100, 150)), overhead=1)


def blocks(*runs: tuple[int, int]) -> BlockRuns:
    return BlockRuns(0, 8, runs)


def conversation(name: str = "s", as_text: bool = False) -> Conversation:
    return Conversation(WORDS, as_text, 0, name)


def test_prompts_have_the_recorded_sizes_and_prefixes() -> None:
    one = conversation("one").prompt(Turn(0.0, 21, 4, blocks((0, 2))))
    same = conversation("two").prompt(Turn(0.0, 30, 4, blocks((0, 2), (9, 1))))
    other = conversation("two").prompt(Turn(0.0, 21, 4, blocks((5, 2))))
    assert (len(one), len(same)) == (21, 30)
    assert one[:16] == same[:16]
    assert one[16:21] != same[16:21]
    assert one[:8] != other[:8]
    assert len(conversation().prompt(Turn(0.0, 13, 4))) == 13


def test_texts_leave_room_for_what_the_tokenizer_adds() -> None:
    text = conversation(as_text=True).prompt(Turn(0.0, 21, 4, blocks((0, 2))))
    assert isinstance(text, str)
    assert len(text.split()) == 20


@pytest.mark.parametrize("as_text", [False, True])
def test_a_turn_repeats_what_was_really_answered(as_text: bool) -> None:
    talk = conversation(as_text=as_text)
    first = Turn(0.0, 16, 4, blocks((0, 3)))
    prompt = talk.prompt(first)
    answer: Any = " a b c d" if as_text else [1, 2, 3, 4]
    talk.take(first, answer, 20)
    following = talk.prompt(Turn(0.0, 32, 4, blocks((0, 4))))
    assert following[: len(prompt)] == prompt
    assert following[len(prompt) : len(prompt) + len(answer)] == answer
    assert len(following.split() if isinstance(following, str) else following) == 32 - as_text


def test_a_turn_that_begins_anew_repeats_nothing() -> None:
    talk = conversation()
    first = Turn(0.0, 16, 4, blocks((0, 2)))
    talk.prompt(first)
    talk.take(first, [1, 2, 3, 4], 20)
    prompt = talk.prompt(Turn(0.0, 24, 4, blocks((7, 3))))
    assert len(prompt) == 24
    assert not {1, 2, 3, 4} & set(prompt)


PAUSE_S = 0.05


class Server:
    """Answers completions; keeps every body, with the time of its coming."""

    def __init__(self) -> None:
        self.bodies: list[tuple[float, dict[str, Any], str]] = []
        self.status = "200 OK"
        self.hangs = False

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.hangs:
            await reader.read(-1)
            writer.close()
            return
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append((asyncio.get_running_loop().time(), body, head))
        count = body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        events = [{"choices": [{"text": "", "token_ids": [7]}]}] * count
        events.append({"choices": [], "usage": usage})
        lines = "".join(f"data: {json.dumps(each)}\n\n" for each in events)
        writer.write(f"HTTP/1.1 {self.status}\r\n\r\n{lines}data: [DONE]\n\n".encode())
        await writer.drain()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    made = Server()
    listener = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    async with listener:
        yield made, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


@pytest.fixture
def player(server: tuple[Server, str]) -> Callable[[str | None], Player]:
    return lambda key: Player(Target(server[1], "m", key), Manner(WORDS, as_text=False))


def talking() -> Trace:
    child = Session("child", 0.0, (Turn(0.0, 8, 1),))
    turns = (Turn(0.0, 16, 3, blocks((0, 3)), (child,)), Turn(PAUSE_S, 32, 2, blocks((0, 4))))
    return Trace("t", [Session("talk", 0.0, turns)])


async def test_sessions_are_closed_loops(
    server: tuple[Server, str], player: Callable[[str | None], Player]
) -> None:
    played = await player("a key").play(talking())
    assert [(each.session, each.turn) for each in played] == [
        ("talk", 0),
        ("child", 0),
        ("talk", 1),
    ]
    first, child, second = played
    assert second.sent - first.end >= PAUSE_S - 0.001  # a loop may round its timers
    assert child.sent >= first.end
    assert [(each.num_prompt, each.num_output) for each in played] == [(16, 3), (8, 1), (32, 2)]
    (_, one, head), _, (_, other, _) = server[0].bodies
    assert other["prompt"][:19] == one["prompt"] + [7, 7, 7]
    assert "x-session-id: talk" in head
    assert "authorization: bearer a key" in head


async def test_a_turn_with_a_recorded_time_is_not_sent_before_it(
    player: Callable[[str | None], Player],
) -> None:
    turns = (Turn(0.0, 16, 3), Turn(0.0, 16, 3, not_before_s=2 * PAUSE_S), Turn(0.0, 16, 3))
    first, second, third = await player(None).play(Trace("t", [Session("s", PAUSE_S, turns)]))
    assert first.sent >= PAUSE_S - 0.001
    assert second.sent >= 3 * PAUSE_S - 0.001
    assert third.sent >= second.end


async def test_a_replay_under_a_salt_says_so_in_every_request(server: tuple[Server, str]) -> None:
    manner = Manner(WORDS, as_text=False, cache_salt="one")
    played = await Player(Target(server[1], "m"), manner).play(talking())
    assert [body["cache_salt"] for _, body, _ in server[0].bodies] == ["one"] * 3
    assert [len(each.gaps_s) for each in played] == [2, 0, 1]


async def test_a_refused_request_counts_and_its_session_goes_on(
    server: tuple[Server, str], player: Callable[[str | None], Player]
) -> None:
    server[0].status = "503 Service Unavailable"
    played = await player(None).play(talking())
    assert len(played) == 3
    assert all("503" in each.error for each in played)


async def test_a_server_that_hangs_does_not_hold_the_replay(
    server: tuple[Server, str],
    player: Callable[[str | None], Player],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server[0].hangs = True
    monkeypatch.setattr("bench.replay.player.ANSWER_S", 0.05)
    played = await player(None).play(talking())
    assert [each.error for each in played] == ["TimeoutError"] * 3


def test_a_shrunk_trace_has_the_same_shape() -> None:
    (session,) = shrunk(talking(), 4).sessions
    assert [turn.num_prompt for turn in session.turns] == [4, 8]
    assert [turn.num_output for turn in session.turns] == [1, 1]
    assert session.turns[0].blocks == BlockRuns(0, 2, ((0, 3),))
    assert session.turns[0].starts[0].turns[0].num_prompt == 2


def test_a_turn_shorter_than_what_was_said_does_not_continue_it() -> None:
    former, turn = (Turn(0.0, tokens, 8, BlockRuns(0, 4, ((0, 4),))) for tokens in (12, 16))
    assert continues(former, turn, num_said=16)
    assert not continues(former, turn, num_said=17)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--speed", "0"], "argument --speed: '0' must be a number of at least 1e-06"),
        (["--speed", "nan"], "argument --speed: 'nan' must be a number"),
        (["--limit", "-1"], "argument --limit: '-1' must be a whole number of at least 1"),
        (["--shrink", "0"], "argument --shrink: '0' must be a whole number of at least 1"),
        (["--span-s", "inf"], "argument --span-s: 'inf' must be a number of at least 0"),
        (["--trace", "/nowhere/trace"], "--trace /nowhere/trace: No such file"),
        (["--json", "/nowhere/played.json"], "--json /nowhere/played.json: No such file"),
    ],
)
def test_a_wrong_argument_is_one_line_before_anything_is_sent(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with contextlib.suppress(SystemExit):
        assert (
            main(["--trace", "poisson:requests=1", "--url", "http://127.0.0.1:1", *arguments]) == 2
        )
    assert words in capsys.readouterr().err.splitlines()[-1]
