"""Measures how often a conversation's history has exactly the tokens that were generated.

    python -m scripts.history_shares [--model FOLDER ...] [--url URL ...] [--plain]

A cached answer serves the next turn only if the rendered history repeats the answer's token ids.
For every model, a fleet of one worker (or the server at a URL) holds sampled conversations; each
answer is sent back as it was received, and the next prompt's ids are compared with those of the
turn before. For every family of chat formats, its template renders answers of several kinds; no
model is needed for that. Turns that differ are counted by reason. `--plain`: without the router's
memory of answers.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import random
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.paths import DEMO_MODEL
from gateway.chat.conversation import Conversation, Message, Tool, ToolCall
from gateway.chat.markup import REASONING_MARKERS, TOOL_MARKUPS, ChatMarkup
from gateway.chat.message_events import joined_calls
from gateway.output.output_text import TextDelta
from gateway.text.chat_template import ChatTemplate
from protocol.messages import FinishReason
from tests.unit.gateway.chat.families import PARAMETERS, Call, written
from tests.unit.gateway.chat.family_templates import TEMPLATES

EQUAL = "same tokens"
TOKENISED = "tokenised differently"
TRIMMED = "trimmed"
REASONING = "reasoning dropped"
CALLS = "calls rewritten"
OTHER = "rendered differently"
REASONS = (EQUAL, TOKENISED, TRIMMED, REASONING, CALLS, OTHER)
_WORDS = " ".join(pydoc_data.topics.topics.values()).split()
_CITY = {"city": "Köln", "days": 2}
_TOOLS = (Tool("weather", parameters=PARAMETERS),)
_QUESTION = Message("user", "What is the weather like?")
_NEXT = Message("user", "Thanks.")


@dataclass
class Shares:
    """How the turns of one model or family came back, by reason."""

    name: str
    turns: Counter[str] = field(default_factory=Counter)

    def share(self, reason: str) -> str:
        """The share of turns with this outcome, in per cent."""
        total = self.turns.total()
        return f"{100 * self.turns[reason] / total:.0f} %" if total else "-"


# -- models: sampled conversations over HTTP ----------------------------------------------------


def measure(name: str, url: str, load: argparse.Namespace) -> Shares:
    """Hold conversations with the server, and compare each prompt with the turn before."""
    shares, rng = Shares(name), random.Random(load.seed)
    for number in range(load.conversations):
        messages: list[dict[str, Any]] = []
        before: list[int] = []
        for turn in range(load.turns):
            start = rng.randrange(len(_WORDS) - 40)
            question = " ".join(_WORDS[start : start + rng.randrange(5, 40)])
            messages.append({"role": "user", "content": question})
            answer = _post(
                f"{url}/v1/chat/completions",
                {
                    "messages": messages,
                    "model": _model_of(url),
                    "max_tokens": load.answer_tokens,
                    "temperature": load.temperature,
                    "seed": 100 * number + turn,
                    "return_token_ids": True,
                },
            )
            choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
            if before:
                shares.turns[_outcome(url, before, prompt)] += 1
            ids = choice["token_ids"]
            before = prompt + (ids[:-1] if choice["finish_reason"] == "stop" else ids)
            messages.append(choice["message"])
    return shares


def _outcome(url: str, before: list[int], prompt: list[int]) -> str:
    if prompt[: len(before)] == before:
        return EQUAL
    earlier, now = (
        _post(f"{url}/detokenize", {"tokens": each})["prompt"] for each in (before, prompt)
    )
    return _difference(earlier, now)


def _difference(earlier: str, now: str) -> str:
    if now.startswith(earlier):
        return TOKENISED
    return TRIMMED if now.startswith(earlier.rstrip()) else OTHER


def _model_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        name: str = json.load(answer)["data"][0]["id"]
        return name


def _post(url: str, body: Mapping[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


# -- families: answers of each kind through their templates --------------------------------------


def family_shares() -> Iterator[Shares]:
    """For every family, the shares of its answers' texts by their outcome in the history."""
    for family, source in TEMPLATES.items():
        template = ChatTemplate(source, {})
        markup = ChatMarkup(TOOL_MARKUPS[family], REASONING_MARKERS["think"])
        shares = Shares(family)
        for text in _answers(family):
            shares.turns[_came_back(template, markup, text)] += 1
        yield shares


def _answers(family: str) -> list[str]:
    """Answers as models of the family write them: plain ones, with reasoning, with calls."""
    call: list[Call] = [("weather", _CITY)]
    two: list[Call] = [*call, ("weather", {"city": "Bern"})]
    texts = ["It rains.", "It rains.\n", "\n\nIt rains.", "It  rains: 3 mm\n\n- a\n- b"]
    plain = [written(family, [], text) if text.strip() else text for text in texts]
    called = [written(family, call), written(family, call, "I ask."), written(family, two)]
    compact = written(family, call).replace('": ', '":')
    return [*plain, "<think>So.</think>\n\nIt rains.", *called, compact]


def _came_back(template: ChatTemplate, markup: ChatMarkup, text: str) -> str:
    asked = Conversation((_QUESTION,), _TOOLS)
    prompt = _render(template, asked.messages, opens=True)
    parser = markup.parser(asked, prompt, "probe")
    message = parser.push(TextDelta(text, [], finish=FinishReason.STOP))
    calls = tuple(
        ToolCall(f"call{number}", each.begin.name, each.arguments)
        for number, each in enumerate(joined_calls(message.events))
        if each.begin is not None
    )
    answer = Message("assistant", message.content, reasoning=message.reasoning, tool_calls=calls)
    history = _render(template, (_QUESTION, answer, _NEXT))
    if history.startswith(prompt + text):
        return EQUAL
    if message.reasoning and message.reasoning not in history:
        return REASONING
    return CALLS if calls else _difference(prompt + text, history)


def _render(template: ChatTemplate, messages: Iterable[Message], opens: bool = False) -> str:
    shape = template.shape(has_tools=True)
    given = [each.for_template(shape, "messages") for each in messages]
    return template.render(given, opens, tools=[tool.for_template() for tool in _TOOLS])


# -- the program ---------------------------------------------------------------------------------


def table(rows: Iterable[Shares], title: str) -> Table:
    """One row for each model or family."""
    shown = Table(title=title)
    shown.add_column("")
    shown.add_column("turns", justify="right")
    for reason in REASONS:
        shown.add_column(reason, justify="right")
    for each in rows:
        shown.add_row(each.name, str(each.turns.total()), *map(each.share, REASONS))
    return shown


def _served(model: str, load: argparse.Namespace) -> Shares:
    """The shares of a model, served by a fleet of its own. Raises BatonError."""
    flags = ("--remember-answers=off",) if load.plain else ()
    config = FleetConfig(
        model, num_prefill=0, worker_flags=("--device=cpu", "--torch-threads=1"), router_flags=flags
    )
    with BenchFleet(config) as fleet:
        return measure(Path(model).stem, fleet.url("router-1"), load)


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m scripts.history_shares", description=__doc__)
    parser.add_argument("--model", action="append", default=[], help="checkpoint to serve")
    parser.add_argument("--url", action="append", default=[], help="server to measure instead")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--answer-tokens", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="the router remembers no answers")
    load = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(family_shares(), "families: texts of their answers in the history"))
    models = load.model or ([] if load.url else [str(DEMO_MODEL)])
    for url in load.url:
        console.print(table([measure(url, url, load)], "sampled conversations"))
    for model in models:
        console.print(table([_served(model, load)], "sampled conversations"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
