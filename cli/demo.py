"""The demo: a fleet with the bundled model, one streamed chat, and where its time went.

`python -m cli.demo`; with `--once` the demo stops after the chat. It fails if no text came.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import cli
from cli.commands import settings_classes
from cli.fleet import Fleet
from cli.http_json import get_json, post_json
from cli.tables import print_table
from cli.time_table import time_table
from cli.up import run_fleet
from cli.up_settings import UpSettings
from process.settings import other_settings, setting, settings_or_exit
from protocol.errors import BatonError, ServiceError

MODEL_FOLDER = Path(cli.__file__).resolve().parent.parent / "demo_model"
SERVED_NAME = "demo_model"
CHAT_TIMEOUT_S = 60.0
TRACE_WAIT_S = 5.0
TRACE_POLL_S = 0.05
MESSAGES = (
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
    {"role": "user", "content": "What are truth values?"},
)


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Settings of the demo."""

    once: bool = setting(False, help="stop after the chat instead of serving on")
    port: int = setting(0, help="port to serve HTTP on; 0: any free one", minimum=0, maximum=65535)
    transport: str = setting("auto", help="how KV blocks move", choices=("auto", "nixl", "shm"))


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns 0 if the chat gave text."""
    with other_settings(settings_classes()):
        settings = settings_or_exit(
            DemoSettings,
            argv,
            prog="demo",
            description="Start a fleet with the bundled model and send it one streamed chat.",
            section="demo",
        )
    console = Console(highlight=False, markup=False, soft_wrap=True)
    fleet = Fleet(fleet_settings(settings), on_progress=console.print)

    def while_serving(started: Fleet) -> bool:
        introduce_workers(started.url)
        chat_once(started.url, console)
        return not settings.once

    try:
        run_fleet(fleet, console, while_serving)
    except BatonError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def fleet_settings(settings: DemoSettings) -> UpSettings:
    """One worker of each role, with chunks small enough that the short chat takes several."""
    return UpSettings(
        model=str(MODEL_FOLDER),
        served_model_name=SERVED_NAME,
        port=settings.port,
        transport=settings.transport,
        num_blocks=2048,
        chunk_max_tokens=32,
    )


def introduce_workers(url: str) -> None:
    """Send one short completion, so that the chat does not wait for the workers' first contact."""
    body = {"model": SERVED_NAME, "prompt": "def with_baton(): " * 16, "max_tokens": 2}
    post_json(f"{url}/v1/completions", body)


def chat_once(url: str, console: Console) -> None:
    """Stream the chat to the console, then show its trace. Raises ServiceError."""
    console.print(f"after {len(MESSAGES) - 1} earlier messages", style="dim")
    console.print(f"user: {MESSAGES[-1]['content']}", style="bold")
    console.print("assistant: ", end="", style="bold")
    chat = StreamedChat(url)
    length = 0
    for text in chat.texts():
        console.print(text, end="")
        console.file.flush()
        length += len(text)
    console.print("\n")
    if not length:
        raise ServiceError("the chat gave no text")
    print_table(console, time_table(finished_trace(url, chat.request_id)))
    console.print()


class StreamedChat:
    """One streamed chat over HTTP; `request_id` is known once `texts` has started."""

    def __init__(self, url: str) -> None:
        self.request_id = ""
        parts = urllib.parse.urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(
            parts.hostname, parts.port, timeout=CHAT_TIMEOUT_S
        )

    def texts(self) -> Iterator[str]:
        """Pieces of the answer as they arrive. Raises ServiceError."""
        body = {"model": SERVED_NAME, "messages": MESSAGES, "stream": True, "temperature": 0}
        try:
            self._connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = self._connection.getresponse()
            if response.status != 200:
                raise ServiceError(f"the chat was answered {response.status}: {response.read()!r}")
            self.request_id = response.headers["x-request-id"]
            for event in _events(response):
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""
        except (OSError, http.client.HTTPException) as error:
            raise ServiceError(f"the chat broke: {error}") from error
        finally:
            self._connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The data of server-sent events until `[DONE]`. Raises ServiceError for an error event."""
    for line in response:
        kind, _, data = line.decode().strip().partition(": ")
        if kind != "data":
            continue
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ServiceError(f"the chat failed: {event['error']['message']}")
        yield event
    raise ServiceError("the chat ended without [DONE]")


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
