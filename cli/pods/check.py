"""`baton check`: sends one chat to a fleet and says whether it was served correctly.

The prompt is new each time and longer than the prompts that decode workers prefill themselves by
default, so that it needs both pools. Knows only the HTTP API.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cli.chat.answer_stream import served_model
from cli.http_json import RouterAccess, post_json, reading_answers, router_root
from cli.status import StatusSettings
from process.settings import setting, setting_of, settings_or_exit
from protocol.errors import ServiceError

_POLL_S = 0.5
_WORDS = "Explain what a program does when it reads a file, changes its lines and writes them back."


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """Settings of `baton check`."""

    router_url: str = setting_of(StatusSettings, "router_url")
    api_key: str | None = setting(
        None,
        help="key of a client, if the router asks for one; if there are several, separated by "
        "commas, the first is sent",
        secret=True,
        flag=False,
    )
    cert_file: str | None = setting_of(StatusSettings, "cert_file")
    both_pools: bool = setting(
        False, help="fail unless a prefill and a decode worker served the chat together"
    )
    wait_s: float = setting(
        60.0, help="how long to try again while the fleet is not ready", unit="s", minimum=0
    )
    timeout_s: float = setting(120.0, help="how long the chat may take", unit="s", minimum=0.1)


def main(argv: Sequence[str]) -> int:
    """Send the chat; returns 1, with one line that says why, if it was not served."""
    settings = settings_or_exit(
        CheckSettings,
        argv,
        prog="baton check",
        description="Send one chat to a fleet and report which workers served it.",
    )
    deadline = time.monotonic() + settings.wait_s
    while True:
        try:
            with reading_answers(settings.router_url):
                print(_chat(settings))
            return 0
        except ServiceError as error:
            if time.monotonic() >= deadline:
                print(f"baton check: {error.message}", file=sys.stderr)
                return 1
        time.sleep(_POLL_S)


def _chat(settings: CheckSettings) -> str:
    """One line about the chat that was served. Raises ServiceError."""
    url = router_root(settings.router_url)
    key = settings.api_key.split(",")[0].strip() if settings.api_key else None
    access = RouterAccess(key, settings.cert_file)
    model = served_model(url, access, None)
    prompt = f"{uuid.uuid4()} " + " ".join([_WORDS] * 8)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 16,
        "temperature": 0,
    }
    answer = post_json(
        f"{url}/v1/chat/completions", body, settings.timeout_s, access, {"x-baton-timing": "1"}
    )
    tokens = answer["usage"]["completion_tokens"]
    placement: dict[str, Any] = answer["baton"]["choices"][0]["placement"]
    prefill, decode = placement["prefill"], placement["decode"]
    if not tokens:
        raise ServiceError(f"{decode} answered without any token")
    if settings.both_pools and prefill is None:
        raise ServiceError(
            f"{decode} served the chat alone: {placement['reason']}; see the prefill workers in "
            "`baton status`"
        )
    workers = decode if prefill is None else f"{prefill} and {decode}"
    return f"{model}: {tokens} tokens by {workers}"
