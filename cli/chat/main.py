"""`baton chat`: asks one question, or holds a conversation until Ctrl-D."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import ANSI
from rich.console import Console

from cli.chat.answer_stream import AnswerStream, Endpoint, served_model
from cli.chat.conversation import COMMANDS, Conversation, parse_command
from cli.chat.settings import ChatSettings, split_question
from cli.chat.turn import show_answer
from cli.http_json import RouterAccess, router_root
from cli.output.terminal_text import plain_console, shown
from process.settings import settings_or_exit
from protocol.addresses import shown_address
from protocol.error_line import one_line
from protocol.errors import ConfigError, ServiceError

_PROMPT = ANSI("\x1b[1;32m>\x1b[0m ")
_INTERRUPTED, _TERMINATED = 130, 143


def main(argv: Sequence[str]) -> int:
    """Answer the question in `argv` or on standard input, or converse. Returns the exit status.
    Raises ConfigError and ServiceError."""
    flags, question = split_question(argv)
    settings = settings_or_exit(
        ChatSettings,
        flags,
        prog="baton chat [QUESTION]",
        description="A conversation with a fleet. With a question, or with standard input from a "
        "pipe or file: one answer. Commands in a conversation: "
        + "; ".join(f"{name}: {what}" for name, what in COMMANDS.items()),
    )
    if not sys.stdin.isatty():
        question = _with_input(question, sys.stdin.read())
    endpoint = _endpoint(settings)
    conversation = Conversation(settings.system)
    if question is not None:
        return _answer_once(endpoint, conversation, question)
    console = plain_console()
    where = shown_address(endpoint.url)
    console.print(f"{endpoint.model} at {where}; /help lists commands", style="dim")
    _converse(endpoint, conversation, console)
    return 0


def _endpoint(settings: ChatSettings) -> Endpoint:
    url = router_root(settings.router_url)
    access = RouterAccess(settings.api_key, settings.cert_file)
    wanted: dict[str, Any] = {
        "temperature": settings.temperature,
        "max_completion_tokens": settings.max_tokens,
    }
    options = {name: value for name, value in wanted.items() if value is not None}
    model = served_model(url, access, settings.model)
    return Endpoint(url, model, access, options, settings.timeout_s)


def _with_input(question: str | None, text: str) -> str:
    """The question and the text that came on standard input. Raises ConfigError if both are
    empty."""
    parts = [part for part in (question, text.strip()) if part]
    if not parts:
        raise ConfigError("there is nothing to ask: standard input is empty")
    return "\n\n".join(parts)


def _answer_once(endpoint: Endpoint, conversation: Conversation, question: str) -> int:
    conversation.ask(question)
    stream = AnswerStream(endpoint, conversation.messages())
    clean = shown if sys.stdout.isatty() else str
    try:
        with contextlib.closing(stream.texts()) as texts:
            for text in texts:
                print(clean(text), end="", flush=True)
    except KeyboardInterrupt:
        print()
        return _INTERRUPTED
    print()
    return 0


def _converse(endpoint: Endpoint, conversation: Conversation, console: Console) -> None:
    session: PromptSession[str] = PromptSession()
    signal.signal(signal.SIGTERM, _terminate)
    while True:
        try:
            _take_line(session.prompt(_PROMPT).strip(), endpoint, conversation, console)
        except EOFError:
            return
        except KeyboardInterrupt:  # at the prompt, or just after an answer
            continue
        except (ConfigError, ServiceError) as error:
            console.print(one_line(error), style="red")


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Exit through Python's cleanup, which restores the mode of the terminal."""
    raise SystemExit(_TERMINATED)


def _take_line(line: str, endpoint: Endpoint, conversation: Conversation, console: Console) -> None:
    """Obey or answer one line. Raises ConfigError and ServiceError."""
    if not line:
        return
    command = parse_command(line)
    if command is None:
        conversation.ask(line)
    elif not _obey(*command, conversation, console):
        return
    show_answer(endpoint, conversation, console)


def _obey(name: str, argument: str, conversation: Conversation, console: Console) -> bool:
    """Run a command. Returns whether the last question is to be answered now. Raises
    ConfigError."""
    if name == "/regenerate":
        conversation.reopen()
        return True
    if name == "/reset":
        conversation.reset()
        console.print("a new conversation", style="dim")
    elif name == "/system":
        conversation.system = argument or None
        console.print("the system prompt is set" if argument else "no system prompt", style="dim")
    elif name == "/save":
        console.print(f"written to {conversation.save(argument)}", style="dim")
    else:
        for each, what in COMMANDS.items():
            console.print(f"{each:<14} {what}", style="dim")
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
