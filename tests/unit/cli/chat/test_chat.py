"""`baton chat`: one question, and a conversation through a pseudo-terminal."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from cli.chat.answer_stream import Endpoint
from cli.chat.conversation import Conversation, parse_command
from cli.chat.main import main
from cli.chat.settings import split_question
from cli.chat.turn import show_answer
from cli.main import main as baton
from protocol.errors import ConfigError, ServiceError
from tests.unit.cli.chat.chat_server import MODEL, ChatServer
from tests.unit.cli.chat.terminal import CTRL_C, CTRL_D, Terminal

SUMMARY = "16 of 40 tokens cached | prefill-1 > decode-1"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    server = ChatServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())


# -- one question -----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_input")
def test_a_question_is_answered_once(server, capsys):
    assert (
        main(["What is it?", "--url", f"{server.url}/v1/", "--system=Be brief.", "--api-key", "k"])
        == 0
    )
    assert capsys.readouterr().out == "Hello there.\n"
    (asked,) = server.asked
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?"},
    ]
    assert asked["model"] == MODEL
    assert "temperature" not in asked
    assert server.keys == ["Bearer k"]


def test_standard_input_is_the_question_or_goes_with_it(server, capsys, monkeypatch):
    for arguments, expected in (
        ([], "a file\nof lines"),
        (["Sum up:"], "Sum up:\n\na file\nof lines"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO("a file\nof lines\n"))
        assert (
            main([f"--router-url={server.url}", "--temperature=0", "--max-tokens=9", *arguments])
            == 0
        )
        assert server.asked[-1]["messages"] == [{"role": "user", "content": expected}]
        assert server.asked[-1]["temperature"] == 0.0
        assert server.asked[-1]["max_completion_tokens"] == 9
    assert capsys.readouterr().out == "Hello there.\n" * 2


@pytest.mark.usefixtures("no_input")
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "nothing to ask"),
        (("a", "b"), 2, "ask one question, in quotes"),
        (("a", "--model=other"), 2, "serves a-model, not other"),
        (("a", "--modle=other"), 2, "did you mean --model?"),
    ],
)
def test_what_is_wrong_is_one_line(server, capsys, arguments, status, message):
    try:
        found = baton(["chat", f"--router-url={server.url}", *arguments])
    except SystemExit as error:
        found = error.code
    assert found == status
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.usefixtures("no_input")
def test_no_router_and_a_refusal_are_one_line(server, capsys):
    assert baton(["chat", "--router-url=http://127.0.0.1:9", "hello"]) == 1
    assert "no router answers at http://127.0.0.1:9" in capsys.readouterr().err
    server.refusal = "the prompt is too long"
    assert baton(["chat", f"--router-url={server.url}", "hello"]) == 1
    assert capsys.readouterr().err == "baton chat: the prompt is too long\n"


@pytest.mark.usefixtures("no_input")
def test_an_answer_that_breaks_off_is_an_error(server):
    server.answers = [["Hel", None]]
    with pytest.raises(ServiceError, match=r"cut off|without \[DONE\]"):
        main([f"--router-url={server.url}", "--timeout-s=2", "hello"])


@pytest.mark.usefixtures("no_input")
@pytest.mark.parametrize("part", ["refusal", "error", "event", "placement"])
def test_nothing_of_a_server_steers_the_terminal(server, capsys, part):
    hostile = "\x1b]52;c;ZXZpbA==\x07 \u202eno\u2066 \ud800"
    if part == "refusal":
        server.refusal = hostile
    elif part == "error":
        server.events = [{"error": {"message": hostile}}]
    elif part == "event":
        server.answers = [[hostile]]
    else:
        server.placement = {"prefill": hostile, "decode": hostile, "reason": hostile}
    status = baton(["chat", f"--router-url={server.url}", "hello"])
    told = capsys.readouterr()
    assert status == (1 if part in ("refusal", "error") else 0)
    told_of = told.err if status else told.out
    if part == "placement":
        conversation, console = Conversation(), Console(file=io.StringIO())
        conversation.ask("?")
        show_answer(Endpoint(server.url, MODEL), conversation, console)
        told_of = console.file.getvalue()
    told_of.encode()
    if part == "event":  # a pipe gets the answer as it is
        assert told_of == hostile.replace("\ud800", "?") + "\n"
        return
    assert "]52;c;ZXZpbA==" in told_of
    assert not {"\x1b", "\x07", "\u202e", "\u2066"} & set(told_of)


# -- a conversation -----------------------------------------------------------------------------


def terminal(server: ChatServer, *arguments: str) -> Terminal:
    return Terminal("cli.main", "chat", f"--router-url={server.url}", *arguments)


def say(screen: Terminal, line: str) -> None:
    """Type a line at the prompt."""
    screen.wait_for(">")
    screen.say(line)


def end(screen: Terminal) -> None:
    """Ctrl-D at the prompt: before it, the key would be the end of another line."""
    screen.wait_for(">")
    assert screen.status(CTRL_D) == 0


def test_a_conversation_through_a_terminal(server, tmp_path):
    server.answers = [["Paris", "."], ["Rome", "."], ["Rome", "!"], ["x"]]
    file = tmp_path / "saved.json"
    with terminal(server, "--system", "Be brief.") as screen:
        screen.wait_for(MODEL)
        say(screen, "France?")
        screen.wait_for("Paris.")
        screen.wait_for(SUMMARY)
        screen.resize(12, 30)
        say(screen, "Italy?")
        screen.wait_for("Rome.")
        screen.wait_for("decode-1")
        say(screen, "/regenerate")
        screen.wait_for("Rome!")
        screen.wait_for("decode-1")
        say(screen, f"/save {file}")
        screen.wait_for("saved.json")
        say(screen, "/nonsense")
        screen.wait_for("is not a command")
        say(screen, "/system Be long.")
        screen.wait_for("the system prompt is set")
        say(screen, "/reset")
        screen.wait_for("a new conversation")
        say(screen, "Spain?")
        screen.wait_for("decode-1")
        screen.wait_for(">")
        screen.type("half a line")
        screen.wait_for("half a line")
        screen.type(CTRL_C)  # drops it
        end(screen)
    paris = {"role": "assistant", "content": "Paris."}
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "France?"}]
    second = [*first, paris, {"role": "user", "content": "Italy?"}]
    assert [each["messages"] for each in server.asked] == [
        first,
        second,
        second,
        [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Spain?"}],
    ]
    saved = json.loads(file.read_text())["messages"]
    assert saved == [*second, {"role": "assistant", "content": "Rome!"}]


def test_sigterm_leaves_the_terminal_as_it_was(server: ChatServer) -> None:
    with terminal(server) as screen:
        former = screen.modes()  # the command is not here yet
        screen.wait_for(">")
        assert screen.modes() != former, "at the prompt, each key is read"
        assert screen.end_by(signal.SIGTERM) == 143
        assert screen.modes() == former


def test_ctrl_c_stops_an_answer_and_keeps_what_came(server):
    server.answers = [["A long", " story", None], ["Go on."]]
    with terminal(server) as screen:
        screen.wait_for(MODEL)
        say(screen, "Tell me.")
        screen.wait_for("story")
        screen.type(CTRL_C)
        screen.wait_for("stopped")
        assert server.was_left.wait(60)
        say(screen, "And?")
        screen.wait_for("Go on.")
        screen.wait_for("decode-1")
        end(screen)
    assert server.asked[1]["messages"] == [
        {"role": "user", "content": "Tell me."},
        {"role": "assistant", "content": "A long story"},
        {"role": "user", "content": "And?"},
    ]


def test_a_refused_question_is_forgotten(server):
    with terminal(server) as screen:
        screen.wait_for(MODEL)
        server.refusal = "too long"
        say(screen, "One?")
        screen.wait_for("too long")
        server.refusal = None
        say(screen, "Two?")
        screen.wait_for("decode-1")
        end(screen)
    assert server.asked[1]["messages"] == [{"role": "user", "content": "Two?"}]


# -- parts --------------------------------------------------------------------------------------


def test_the_question_may_stand_anywhere():
    assert split_question(["--url", "u", "why?", "--model=m"]) == (
        ["--url", "u", "--model=m"],
        "why?",
    )
    assert split_question(["--", "--why?"]) == ([], "--why?")
    assert split_question([]) == ([], None)


def test_an_answer_on_a_console_cannot_steer_it(server):
    server.answers = [["a\x1b[2J", "b"]]
    conversation, console = Conversation(), Console(file=io.StringIO())
    conversation.ask("?")
    stream = show_answer(Endpoint(server.url, MODEL), conversation, console)
    assert stream.text == "a\x1b[2Jb"
    assert console.file.getvalue().startswith("a[2Jb\n")


def test_commands_are_told_from_messages():
    assert parse_command("What is /etc?") is None
    assert parse_command("/system  Be brief. ") == ("/system", "Be brief.")
    with pytest.raises(ConfigError, match="/nope is not a command"):
        parse_command("/nope")


def test_an_answer_that_cannot_be_made_again_stays():
    conversation = Conversation()
    conversation.ask("One?")
    conversation.answer("1")
    before = conversation.messages()
    conversation.reopen()
    assert conversation.messages() == before[:1]
    conversation.answer("")  # refused, or stopped at once
    assert conversation.messages() == before
    conversation.reopen()
    conversation.answer("One.")
    conversation.ask("Two?")
    conversation.answer("")
    assert [each["content"] for each in conversation.messages()] == ["One?", "One."]


def test_there_must_be_an_answer_to_make_again(tmp_path: Path):
    conversation = Conversation()
    with pytest.raises(ConfigError, match="no answer"):
        conversation.reopen()
    with pytest.raises(ConfigError, match="cannot be written"):
        conversation.save(str(tmp_path / "none" / "file"))
    with pytest.raises(ConfigError, match="no home folder"):
        conversation.save("~nobody-of-this-name/file")


def test_text_that_is_not_unicode_is_saved_as_it_is(tmp_path: Path) -> None:
    """In the locale C a terminal's bytes may be no text."""
    conversation = Conversation("caf\udce9")
    path = conversation.save(str(tmp_path / "file"))
    assert json.loads(path.read_text())["messages"] == conversation.messages()
