"""Asks the demo model for chats and completions that differ in one parameter."""

from __future__ import annotations

from typing import Any

from tests.faults.faulty_fleet import FaultyFleet
from tests.http_client import HTTP
from tests.integration.openai_types import post, post_stream
from tests.integration.reference import DEMO_MODEL

NUM_TOKENS = 16
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What is a lambda?"}]
PROMPT = "The with statement is used to wrap the execution of a block with methods defined by a "


class Api:
    """Sends greedy requests for short outputs, unless fields say otherwise."""

    def __init__(self, fleet: FaultyFleet) -> None:
        self.fleet = fleet
        self.url = fleet.url

    def body(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        asked = {"messages": QUESTION} if path == CHAT else {"prompt": PROMPT}
        usual = {"model": DEMO_MODEL.name, "temperature": 0, "max_tokens": NUM_TOKENS}
        return {**usual, **asked, **fields}

    def chat(self, **fields: Any) -> dict[str, Any]:
        return post(self.url, CHAT, self.body(CHAT, fields))

    def complete(self, **fields: Any) -> dict[str, Any]:
        return post(self.url, COMPLETIONS, self.body(COMPLETIONS, fields))

    def complete_patiently(self, **fields: Any) -> dict[str, Any]:
        """Send a completion with long targets, so that it waits for the cheapest worker."""
        headers = {"x-baton-ttft-ms": "600000", "x-baton-tpot-ms": "60000"}
        body = self.body(COMPLETIONS, fields)
        answer = HTTP.post(f"{self.url}{COMPLETIONS}", json=body, headers=headers, timeout=120)
        return dict(answer.raise_for_status().json())

    def stream(self, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
        return post_stream(self.url, path, self.body(path, fields))

    def text(self, **fields: Any) -> str:
        return str(self.complete(**fields)["choices"][0]["text"])

    def ids(self, **fields: Any) -> list[int]:
        answer = self.complete(return_token_ids=True, **fields)
        return list(answer["choices"][0]["token_ids"])

    def message(self, **fields: Any) -> dict[str, Any]:
        return dict(self.chat(**fields)["choices"][0]["message"])

    def prompt_tokens(self, **fields: Any) -> int:
        return int(self.chat(**fields)["usage"]["prompt_tokens"])

    def ignored(self, path: str, **fields: Any) -> str:
        """The names of the fields that the answer ignored."""
        answer = HTTP.post(f"{self.url}{path}", json=self.body(path, fields), timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.headers.get("x-baton-ignored", "")

    def refusal(self, path: str, **fields: Any) -> str:
        answer = HTTP.post(f"{self.url}{path}", json=self.body(path, fields), timeout=60)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["param"])
