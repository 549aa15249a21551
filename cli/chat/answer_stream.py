"""One streamed answer of a fleet over HTTP, with what it cost.

Owns the request and its connection. The answer's text is passed on as the router sends it; the
router's other texts (errors, names) are made harmless for a terminal.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cli.http_json import (
    OPEN_ACCESS,
    RouterAccess,
    RouterUnreachable,
    error_message,
    get_json,
)
from cli.output.terminal_text import shown, shown_json
from protocol.addresses import shown_address
from protocol.errors import ConfigError, ServiceError

Message = dict[str, str]
_TIMING_HEADER = "x-baton-timing"


@dataclass(frozen=True)
class Endpoint:
    """A fleet's chat API and the model to ask; `options` go into each request."""

    url: str
    model: str
    access: RouterAccess = OPEN_ACCESS
    options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0


def served_model(url: str, access: RouterAccess, wanted: str | None) -> str:
    """The name of the wanted model, or the only one that the fleet serves. Raises ServiceError,
    and ConfigError if the fleet does not serve the wanted one."""
    listed = get_json(f"{url}/v1/models", access=access)
    try:
        names = [str(each["id"]) for each in listed["data"]]
    except (KeyError, TypeError) as error:
        raise ServiceError(f"{shown_address(url)} does not list models: is it a router?") from error
    if not names:
        raise ServiceError(f"{shown_address(url)} serves no model yet")
    if wanted is not None and wanted not in names:
        raise ConfigError(f"{shown_address(url)} serves {', '.join(names)}, not {wanted}")
    return wanted or names[0]


class AnswerStream:
    """An answer to `messages`: iterate over `texts`, then read the rest.

    If the iteration is closed early, `text` holds what came, and the router stops generating.
    """

    def __init__(self, endpoint: Endpoint, messages: Sequence[Message]) -> None:
        self._endpoint = endpoint
        self._messages = list(messages)
        self.text = ""
        self.request_id = ""
        self.ttft_s: float | None = None
        """Seconds from the request to the first text; None before it."""
        self._first_at = self._last_at = 0.0
        self._usage: dict[str, Any] = {}
        self._placement: dict[str, Any] = {}

    def texts(self) -> Generator[str, None, None]:
        """Pieces of the answer as they arrive. Raises ServiceError."""
        began = time.monotonic()
        try:
            with contextlib.closing(self._open()) as response:
                self.request_id = response.headers.get("x-baton-request-id", "")
                for event in _events(response):
                    text = self._take(event)
                    if not text:
                        continue
                    self._last_at = time.monotonic()
                    if self.ttft_s is None:
                        self._first_at = self._last_at
                        self.ttft_s = self._first_at - began
                    self.text += text
                    yield text
        except (OSError, http.client.HTTPException) as error:
            raise ServiceError(shown(f"the answer was cut off: {error}")) from error

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the answer; None if it was left early."""
        return self._usage.get("completion_tokens")

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None if the answer was left early."""
        return self._usage.get("prompt_tokens")

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt whose KV lay in a cache."""
        details = self._usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None for fewer than two tokens."""
        seconds = self._last_at - self._first_at
        if self.num_tokens is None or self.num_tokens < 2 or seconds <= 0:
            return None
        return (self.num_tokens - 1) / seconds

    @property
    def place(self) -> str | None:
        """The workers that served the answer: `prefill-1 > decode-1`, or a single one."""
        decode, prefill = self._placement.get("decode"), self._placement.get("prefill")
        if decode is None:
            return None
        return str(decode) if prefill is None else f"{prefill} > {decode}"

    def _open(self) -> Any:
        endpoint = self._endpoint
        url = f"{endpoint.url}/v1/chat/completions"
        body = {
            "model": endpoint.model,
            "messages": self._messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **endpoint.options,
        }
        headers = {"Content-Type": "application/json", _TIMING_HEADER: "1"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            return endpoint.access.open(request, endpoint.timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise ServiceError(shown(_refusal(error))) from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            where = shown_address(endpoint.url)
            raise RouterUnreachable(shown(f"no router answers at {where}: {reason}")) from error

    def _take(self, event: dict[str, Any]) -> str:
        self._usage = event.get("usage") or self._usage
        timing = (event.get("baton") or {}).get("choices") or []
        if timing:
            self._placement = shown_json(timing[0].get("placement") or {})
        texts = []
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            texts += [delta.get("reasoning_content") or "", delta.get("content") or ""]
        return "".join(texts).encode(errors="replace").decode()  # no halves of surrogate pairs


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The data of server-sent events until `[DONE]`. Raises ServiceError for an error event."""
    for line in response:
        kind, _, data = line.decode(errors="replace").strip().partition(": ")
        if kind != "data":
            continue
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ServiceError(
                shown(f"the router sent text that is not JSON: {data[:100]}")
            ) from error
        if "error" in event:
            raise ServiceError(shown(str(event["error"].get("message", event["error"]))))
        yield event
    raise ServiceError("the answer ended without [DONE]")


def _refusal(error: urllib.error.HTTPError) -> str:
    """The message of OpenAI's error shape, or the beginning of whatever came."""
    content = error.read().decode(errors="replace").strip()
    return error_message(content) or f"{error.url} answers {error.code}: {content[:500]}"
