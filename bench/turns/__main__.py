"""Conversations turn by turn: the tokens that each turn computes again, and the time until it
begins to answer.

    python -m bench.turns [--model FOLDER|FILE.gguf] [--conversations 6] [--clients 3]
        [--sessions FILE.jsonl] [--peer-python PYTHON] [--only "colocated" --only "by load"]

Holds the same conversations with every contestant: one prefill and two decode workers that place
requests by cached blocks or by load, with and without fetching blocks from each other; one
colocated worker with prefix caching on the same cores; and vLLM with prefix caching, if the
interpreter at `--peer-python` has it. Conversations have six turns (a history of 500 to 4,000
tokens, new parts of 20 to 1,500, answers of 50 to 400), shortened to the model's context. With
`--sessions`, recorded sessions of agents are held, too: a JSON object a line, each with `requests`
that have `in`, `out` and `blocks` (runs of 64-token blocks, [first id, count]). Contestants take
turns, and those that wait are stopped. Computed tokens are counted by reason; ratios compare the
same turns of two contestants. Exits with 1 if turns compute more than is new, or begin to answer
later than they should (`bench.turns.verdicts`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.engine.limits import step_needs
from bench.engine.server_process import HOST, Server
from bench.engine.workloads import EngineNeeds
from bench.tools.paths import DEMO_MODEL
from bench.tools.records import add_record_option, keep_table
from bench.turns.accounts import Account, TurnResult, account
from bench.turns.contestants import Contestant, contestants
from bench.turns.conversations import Conversation, agent_sessions, sample_text, six_turns
from bench.turns.talk import Talk
from bench.turns.verdicts import Verdict, verdicts
from checkpoint.model_source import resolve_model
from engine.checkpoint.config import load_model_config
from process.cores import usable_cores
from protocol.errors import BatonError

Running = tuple[Contestant, Server]


@dataclass(frozen=True)
class Load:
    """The conversations of one table, `clients` at a time."""

    title: str
    conversations: Sequence[Conversation]
    clients: int

    @property
    def groups(self) -> Iterable[Sequence[Conversation]]:
        """Conversations that are held at once, between two changes of contestants."""
        for start in range(0, len(self.conversations), self.clients):
            yield self.conversations[start : start + self.clients]

    @property
    def cuts(self) -> set[tuple[str, int]]:
        """The turns before which the history is cut."""
        return {
            (each.name, number)
            for each in self.conversations
            for number, turn in enumerate(each.turns)
            if turn.kept_tokens is not None
        }

    @property
    def num_tokens(self) -> int:
        """An upper bound of all new tokens, because the lengths of texts are only approximate."""
        turns = [turn for each in self.conversations for turn in each.turns]
        return sum(3 * (each.new_tokens + each.answer_tokens) // 2 for each in turns)


def run(load: Load, running: Sequence[Running]) -> dict[str, Account]:
    """Hold all conversations with all contestants. Raises BatonError if a request fails."""
    results: dict[str, list[TurnResult]] = defaultdict(list)
    order = list(running)
    for group in load.groups:
        for contestant, server in order:
            with server.awake():
                words = _words_per_token(server)
                results[contestant.name] += asyncio.run(
                    _hold(group, server, words, contestant.takes_seeds)
                )
        order = [*order[1:], order[0]]
    return {
        each.name: account(results[each.name], load.cuts, each.block_size) for each, _ in running
    }


async def _hold(
    group: Sequence[Conversation], server: Server, words_per_token: float, takes_seeds: bool
) -> list[TurnResult]:
    talk = Talk(server.port, server.model, words_per_token, takes_seeds=takes_seeds)
    results = await asyncio.gather(*(talk.hold(each) for each in group))
    return [turn for turns in results for turn in turns]


def _words_per_token(server: Server) -> float:
    sample = sample_text()
    body = json.dumps({"model": server.model, "prompt": sample}).encode()
    url, kind = f"http://{HOST}:{server.port}/tokenize", {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, kind), timeout=60) as answer:
        count: int = json.load(answer)["count"]
    return len(sample.split()) / count


def report(load: Load, accounts: dict[str, Account], contestants: Sequence[Contestant]) -> Table:
    """One row for each contestant. TTFT is compared with that of the first one, and of the same
    fleet without fetching."""
    table = Table(title=f"{load.title}, {load.clients} at a time, load {os.getloadavg()[0]:.1f}")
    base = next(iter(accounts))
    for name in (
        "", "computed / new", "new", "a block", "rendering", "chosen",
        "TTFT p50", "p95", f"/ {base}", "/ no fetching",
    ):  # fmt: skip
        table.add_column(name, justify="right" if name else "left")
    for contestant in contestants:
        if contestant.missing:
            table.add_row(contestant.name, contestant.missing)
            continue
        each, plain = accounts[contestant.name], accounts.get(contestant.without)
        parts = each.computed
        table.add_row(
            contestant.name,
            f"{each.per_new:.2f}",
            *(f"{count:,}" for count in (parts.new, parts.block, parts.rendering, parts.chosen)),
            f"{each.p50:,.0f} ms",
            f"{each.p95:,.0f} ms",
            f"{each.ratio_to(accounts[base]):.2f}",
            "" if plain is None else f"{each.ratio_to(plain):.2f}",
        )
    return table


def main(argv: list[str]) -> int:
    """Run and print the tables."""
    arguments = _parser().parse_args(argv)
    model = Path(arguments.model).resolve()
    config = load_model_config(resolve_model(model))
    context = min(config.max_position_embeddings, arguments.max_context)
    loads = [Load("six turns", six_turns(arguments.conversations, context, 1), arguments.clients)]
    if arguments.sessions is not None:
        with Path(arguments.sessions).open(encoding="utf-8") as lines:
            sessions = agent_sessions(lines, arguments.conversations, context, 1000)
        loads.append(Load("agents", sessions, arguments.clients))
    needs = _needs(model, arguments.dtype, context, loads)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        chosen = [
            each
            for each in contestants(needs, arguments.peer_python)
            if not arguments.only or any(each.name.startswith(only) for only in arguments.only)
        ]
        with ExitStack() as stack:
            running = [
                (each, stack.enter_context(Server(each.command, needs)))
                for each in chosen
                if each.command is not None
            ]
            found: list[Verdict] = []
            for load in loads:
                accounts = run(load, running)
                table = report(load, accounts, chosen)
                console.print(table)
                keep_table(arguments.record, f"turns {load.title}", table)
                found += judge(load, accounts, chosen, console)
    except BatonError as error:
        print(f"bench.turns: {error}", file=sys.stderr)
        return 1
    return 0 if all(each.holds for each in found) else 1


def judge(
    load: Load, accounts: dict[str, Account], contestants: Sequence[Contestant], console: Console
) -> list[Verdict]:
    """Print each claim about a load, and whether it holds."""
    found = verdicts(accounts, contestants)
    for each in found:
        console.print(f"{'ok' if each.holds else 'FAILED'}  {load.title}: {each.text}")
    return found


def _needs(model: Path, dtype: str, context: int, loads: Sequence[Load]) -> EngineNeeds:
    config = load_model_config(resolve_model(model))
    return EngineNeeds(
        folder=model,
        dtype=dtype,
        threads=len(usable_cores()),
        max_context=context,
        max_sequences=16,
        num_tokens=sum(load.num_tokens for load in loads),
        kv_bytes_per_token=step_needs(config).kv_bytes_per_token,
        step_tokens=512,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.turns", description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="folder or GGUF file")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--clients", type=int, default=3, help="conversations at a time")
    parser.add_argument("--sessions", help="file of recorded sessions of agents")
    parser.add_argument("--max-context", type=int, default=8192, help="shortens conversations")
    parser.add_argument("--peer-python", help="interpreter of an environment that has vLLM")
    parser.add_argument("--only", action="append", default=[], help="contestants whose names begin")
    add_record_option(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
