"""How many JSON schemas Baton enforces, and whether the accepted texts follow them.

    python -m bench.schemas [FOLDER] [--strict] [--optional] [--model FOLDER] [--list]

Reads every JSON file below FOLDER, in the layout of the JSON Schema test suite (a list of schemas,
each with tests) or of MaskBench (one schema with tests in a file); without a folder, the cases that
come with the project. Each schema is read and compiled as a request's would be, with or without
`strict`; then each instance is offered to its grammar as compact JSON. Where a part of a
schema was dropped, wrong accepts are counted apart: the answer's header names that part. Exits with
1 if an instance was accepted wrongly although nothing was dropped.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from rich.console import Console
from rich.table import Table

from bench.tools.paths import DEMO_MODEL
from gateway.grammars.grammar_checker import plain_trouble
from gateway.grammars.json_schemas import SchemaReader
from protocol.errors import InvalidRequest

OWN_CASES = Path(__file__).parent / "cases"
MAX_WEAKENINGS = 4
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|/[^ ]*/|-?\d[\d.]*")


@dataclass(frozen=True)
class SchemaCase:
    """A schema and its instances, each with whether it follows the schema."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


@dataclass
class Tally:
    """The outcomes of the schemas and of their instances."""

    schemas: int = 0
    whole: int = 0
    weakened: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    right_accepts: int = 0
    right_rejects: int = 0
    wrong_accepts: list[str] = field(default_factory=list)
    announced_accepts: int = 0
    wrong_rejects: list[str] = field(default_factory=list)


def cases_in(folder: Path, with_optional: bool = False) -> Iterator[SchemaCase]:
    """All cases below a folder. Files of other layouts are skipped, and folders called optional
    unless they are wanted."""
    for path in sorted(folder.rglob("*.json")):
        if "optional" in path.relative_to(folder).parts and not with_optional:
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = content if isinstance(content, list) else [content]
        for entry in entries:
            if not isinstance(entry, dict) or "schema" not in entry or "tests" not in entry:
                continue
            name = f"{path.relative_to(folder)}: {entry.get('description', '')}"
            tests = [(each["data"], bool(each["valid"])) for each in entry["tests"]]
            yield SchemaCase(name, entry["schema"], tests)


class Judge:
    """Compiles schemas against one vocabulary and offers instances to them."""

    def __init__(self, model: Path, strict: bool) -> None:
        self._vocabulary = LLTokenizer(str(model / "tokenizer.json"), slices=[])
        self._strict = strict
        self.tally = Tally()

    def take(self, case: SchemaCase) -> None:
        """Count one case."""
        tally = self.tally
        tally.schemas += 1
        try:
            reader = self._compiled(case.schema)
        except InvalidRequest as error:
            tally.refused[_QUOTED.sub("...", error.message)[:110]] += 1
            return
        if reader.dropped:
            tally.weakened += 1
        else:
            tally.whole += 1
        for instance, is_valid in case.instances:
            is_accepted = self._accepts(reader.grammar, instance)
            shown = f"{case.name}: {json.dumps(instance)[:80]}"
            if is_accepted and is_valid:
                tally.right_accepts += 1
            elif not is_accepted and not is_valid:
                tally.right_rejects += 1
            elif not is_accepted:
                tally.wrong_rejects.append(shown)
            elif reader.dropped:
                tally.announced_accepts += 1
            else:
                tally.wrong_accepts.append(shown)

    def _compiled(self, schema: Any) -> SchemaReader:
        """The schema as it can be enforced. Raises InvalidRequest."""
        reader = SchemaReader(schema, "schema", self._strict)
        for _ in range(MAX_WEAKENINGS):
            matcher = LLMatcher(self._vocabulary, reader.grammar, log_level=0)
            if not matcher.is_error():
                return reader
            trouble = matcher.get_error()
            if not reader.try_weaken(trouble):
                break
        raise InvalidRequest(plain_trouble(trouble))

    def _accepts(self, grammar: str, instance: Any) -> bool:
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
        tokens = self._vocabulary.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def report(tally: Tally, console: Console, lists: bool) -> None:
    """Print the counts; with `lists` also which instances were wrong."""
    table = Table("", "count", title="JSON schemas as constraints")
    for name, count in (
        ("schemas", tally.schemas),
        ("enforced as they are", tally.whole),
        ("enforced in part, and named", tally.weakened),
        ("refused", sum(tally.refused.values())),
        ("instances accepted rightly", tally.right_accepts),
        ("instances rejected rightly", tally.right_rejects),
        ("wrong accepts", len(tally.wrong_accepts)),
        ("accepts for what was dropped", tally.announced_accepts),
        ("wrong rejects", len(tally.wrong_rejects)),
    ):
        table.add_row(name, f"{count:,}")
    console.print(table)
    for reason, count in tally.refused.most_common():
        console.print(f"{count:5}  refused: {reason}", markup=False, highlight=False)
    if lists:
        for kind, found in (("accepted", tally.wrong_accepts), ("rejected", tally.wrong_rejects)):
            for each in found:
                console.print(f"wrongly {kind}: {each}", markup=False, highlight=False)


def main(argv: Sequence[str]) -> int:
    """Judge the schemas of a folder; 0 if no instance was accepted wrongly in silence."""
    cli = argparse.ArgumentParser(prog="python -m bench.schemas", description=__doc__)
    cli.add_argument("folder", nargs="?", type=Path, default=OWN_CASES)
    cli.add_argument("--strict", action="store_true", help="as with `strict: true`")
    cli.add_argument("--model", type=Path, default=DEMO_MODEL, help="whose vocabulary to use")
    cli.add_argument("--list", action="store_true", help="list the instances that were wrong")
    cli.add_argument("--optional", action="store_true", help="read folders called optional, too")
    arguments = cli.parse_args(argv)
    judge = Judge(arguments.model, arguments.strict)
    for case in cases_in(arguments.folder, arguments.optional):
        judge.take(case)
    report(judge.tally, Console(soft_wrap=True), arguments.list)
    if not judge.tally.schemas:
        print(f"bench.schemas: no cases in {arguments.folder}", file=sys.stderr)
        return 2
    return 1 if judge.tally.wrong_accepts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
