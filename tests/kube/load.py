"""Streams of chat through a release's service, compared with their first answers.

Each client asks one of a few questions again and again, greedily, so the same text must come back
whatever happens to the fleet meanwhile. An answer that differs, ends early or fails is an error.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field

import httpx

ANSWERS_S = 120.0
QUESTIONS = (
    "Explain the with statement.", "What is a lambda?", "How do I read a file?",
    "What is a generator?",
)  # fmt: skip


@dataclass
class Outcome:
    """What the clients saw."""

    finished: int = 0
    errors: list[str] = field(default_factory=list)


class Load:
    """Clients in threads; `stop` returns the outcome."""

    def __init__(self, url: str, key: str, model: str, num_clients: int, max_tokens: int) -> None:
        self._url, self._model, self._max_tokens = url, model, max_tokens
        self._headers = {"authorization": f"Bearer {key}"}
        self._expected: dict[str, str] = {}
        self._outcome = Outcome()
        self._changed = threading.Condition()
        self._is_over = threading.Event()
        for question in QUESTIONS:
            self._expected[question] = self._ask(question)
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def assert_goes_on(self, answers: int = 8) -> None:
        """Wait until the clients have so many more answers."""
        outcome = self._outcome
        with self._changed:
            wanted = outcome.finished + answers
            self._changed.wait_for(lambda: outcome.finished >= wanted, ANSWERS_S)
        assert outcome.finished >= wanted, (
            f"{outcome.finished} of {wanted} answers in {ANSWERS_S:g} s, {outcome.errors[:3]}"
        )

    def stop(self) -> Outcome:
        """Let every client finish its answer."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads)
        return self._outcome

    def _run(self, number: int) -> None:
        question = QUESTIONS[number % len(QUESTIONS)]
        while not self._is_over.is_set():
            try:
                text = self._ask(question)
                error = "" if text == self._expected[question] else f"another text: {text!r}"
            except (httpx.HTTPError, ValueError) as failure:
                error = f"{type(failure).__name__}: {failure}"
            with self._changed:
                if error:
                    self._outcome.errors.append(error)
                else:
                    self._outcome.finished += 1
                self._changed.notify_all()

    def _ask(self, question: str) -> str:
        """One streamed answer. Raises ValueError if it fails or ends without `[DONE]`."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        text, is_done = "", False
        with httpx.stream(
            "POST", f"{self._url}/v1/chat/completions", json=body, headers=self._headers,
            timeout=120,
        ) as response:  # fmt: skip
            if response.status_code != 200:
                raise ValueError(f"{response.status_code}: {response.read()!r}")
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    is_done = True
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(f"in the stream: {event['error']}")
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
        if not is_done:
            raise ValueError("the stream ended without [DONE]")
        return text
