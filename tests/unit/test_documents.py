"""The documents speak of files, headings and constants that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from decode_worker.settings import DecodeSettings
from gateway.api import body_reader, choice_planner, context, generation_fields, strict_model
from gateway.api.anthropic.request import MessagesRequest
from gateway.api.function_tools import Hint
from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai.completion_request import CompletionRequest
from gateway.api.openai_responses.request import ResponsesRequest
from gateway.api.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.api.unknown_fields.ignorable_fields import Ignorable
from gateway.chat import tool_parser
from gateway.grammars import grammar, grammar_checker
from gateway.http import connection, request_scope
from gateway.http.variants import content_encoding
from http_kit import errors
from kv_transfer.tiers import tier_news
from process.settings.spec import specs_of
from process.sockets import options
from process.store import response_records
from router.routing import costs, pace, policy
from router.routing.caches import expected_blocks
from router_process.settings import RouterSettings
from scheduling import session_service, turns
from tests.paths import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|h|cuh|tpl|yaml|toml|sh|md|json)|(?:[\w.-]+/)+)`")
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@cache
def anchors(document: Path) -> frozenset[str]:
    """The headings of a document, as GitHub names them in links."""
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    )


def dead_links(document: Path) -> list[str]:
    """The links of a document to files and headings that do not exist."""
    found = []
    for link in _LINK.findall(document.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link or path.startswith("mailto:"):
            continue
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_leads_somewhere(document: Path) -> None:
    assert dead_links(document) == []


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page: two\n[a](gone.md) [b](#a-page-two) [c](#other) [d](https://x/y)\n")
    assert dead_links(page) == ["gone.md", "#other"]


def missing_files(text: str) -> list[str]:
    """The files and folders in a table's rows that do not exist.

    A name without its folder is in the folder of another file in the row, or in one named there.
    """
    found = []
    for row in re.findall(r"^\|.*\|$", text, re.MULTILINE):
        names = _FILE.findall(row)
        folders = [
            ROOT,
            *(ROOT / name if name[-1] == "/" else (ROOT / name).parent for name in names),
        ]
        found += [name for name in names if not any((each / name).exists() for each in folders)]
    return found


def test_files_in_the_tables_of_the_readme_exist() -> None:
    assert missing_files((ROOT / "README.md").read_text(encoding="utf-8")) == []


def test_a_file_that_does_not_exist_is_found() -> None:
    assert missing_files("| x | `worker/loop.py`, `intake.py`, `gone.py`, `router/` |\n") == [
        "gone.py"
    ]


def test_every_package_has_a_row_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE))
    packages = {each.parent.name for each in ROOT.glob("*/__init__.py")}
    assert packages - rows == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_name_files_that_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    paths = re.findall(r"(?<![\w./-])(?:\./)?((?:tests|scripts|deploy)/[\w./-]*\w)", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def missing_programs(text: str) -> list[str]:
    """The programs of `bench` and `tests` that a document names and nobody can start."""
    names = re.findall(r"\b((?:bench|tests)(?:\.[a-z_]+)+)(?=[ `])", text)
    paths = {name: ROOT / name.replace(".", "/") for name in names}
    return [
        name
        for name, path in paths.items()
        if not (path / "__main__.py").exists() and not path.with_suffix(".py").exists()
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_programs_in_documents_exist(document: Path) -> None:
    assert missing_programs(document.read_text(encoding="utf-8")) == []


def test_a_program_that_does_not_exist_is_found() -> None:
    assert missing_programs("`python -m bench.engine --x`, `bench.gone`") == ["bench.gone"]


SETTINGS = {**specs_of(RouterSettings), **specs_of(DecodeSettings)}
_DEFAULT = re.compile(
    r"`(?:--)?([a-z][a-z_-]+)`(?:[^`|.;\n]{0,40}?\((?:by default )?|, (?=\d+ m?s\b))"
    r"(\d[\d,]*(?:\.\d+)?)( MiB)?"
)


def wrong_defaults(text: str) -> list[str]:
    """The settings whose number in parentheses is not their default."""
    found = []
    for name, number, mebibytes in _DEFAULT.findall(text):
        spec = SETTINGS.get(name.replace("-", "_"))
        value = float(number.replace(",", "")) * ((1 << 20) if mebibytes else 1)
        if spec is not None and spec.default != value:
            found.append(f"{name} ({number}{mebibytes}): {spec.default}")
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_defaults_of_settings_are_those_of_the_code(document: Path) -> None:
    assert wrong_defaults(document.read_text(encoding="utf-8")) == []


def test_a_wrong_default_is_found() -> None:
    assert wrong_defaults("silent for `keepalive_s` (14 s)") == ["keepalive_s (14): 15.0"]
    assert wrong_defaults("its lease (`lease_s`, 9 s) ends") == ["lease_s (9): 2.0"]


def default(name: str) -> float:
    """The default of a setting that is a number."""
    return float(SETTINGS[name].default)


_STOP = (generation_fields.MAX_STOP_STRINGS, generation_fields.MAX_STOP_STRING_CHARS)
_HALF = (pace.STEPS, pace.TOKENS)
LIMITS: list[tuple[str, str, object]] = [
    ("api.md", "lists and objects | {:,} |", strict_model.MAX_PARTS),
    ("api.md", "| values of any kind | {:,};", strict_model.MAX_VALUES),
    ("api.md", "| bytes outside strings | {} MiB |", strict_model.MAX_BYTES_OUTSIDE >> 20),
    ("api.md", "| escaped characters in strings | {:,} |", strict_model.MAX_ESCAPES),
    ("api.md", "calls in one list | {:,} |", strict_model.MAX_LIST_ITEMS),
    ("api.md", "token ids in one list | {:,} |", strict_model.MAX_TOKEN_IDS),
    ("api.md", "prompts times choices | {} |", generation_fields.MAX_CHOICES),
    ("api.md", "A body of more than {} KiB", context.MAX_INLINE_BYTES >> 10),
    ("api.md", "at most {} KiB, then the number", request_scope.MAX_IGNORED_BYTES >> 10),
    ("api.md", "A message has at most {:,} characters", errors.MAX_MESSAGE_CHARS),
    ("api.md", "`allowed_token_ids` (up to {:,})", generation_fields.MAX_ALLOWED_TOKENS),
    ("api.md", "`bad_words` (up to {:,},", generation_fields.MAX_BAD_STRINGS),
    ("api.md", "reports at most {:,} values", choice_planner.MAX_REPORTED_VALUES),
    ("api.md", "reports at most {:,} log-probabilities", choice_planner.MAX_REPEATED_VALUES),
    ("api.md", "have at most {:,} tokens", choice_planner.MAX_STARTED_TOKENS),
    ("api.md", "nests deeper than {} levels", grammar_checker.MAX_SCHEMA_NESTING),
    ("api.md", "more than {} optional properties", grammar_checker.MAX_OPTIONAL_PROPERTIES),
    ("api.md", "From {:,} characters on", tool_parser.MAX_HELD_CHARS),
    ("api.md", "| {} h, at most", response_records.TTL_S // 3600),
    ("api.md", "h, at most {:,} for each key", response_records.MOST_RECORDS),
    ("kv-reuse.md", "a load from its tiers, {:g} ms and", costs.LOAD_MS),
    ("kv-reuse.md", "for a fetch, {:g} ms and", costs.FETCH_MS),
    ("kv-reuse.md", "decode worker of a pair | {:g} ms,", costs.HANDOFF_MS),
    ("kv-reuse.md", "differ by less than {:g} %", policy.NEAR_TIE * 100),
    ("kv-reuse.md", "or by the time of {} tokens", policy.TIE_TOKENS),
    ("kv-reuse.md", "half after {0[0]} steps and {0[1]} prompt tokens", _HALF),
    ("kv-reuse.md", "half as much after each {:g} s without", pace.HALF_LIFE_US / 1e6),
    ("kv-reuse.md", "hear of at most {:,} blocks of each tier", tier_news.MAX_REPORTED),
    ("operating.md", "a block | {:,} blocks for each worker |", expected_blocks.MAX_PENDING),
    ("operating.md", "up to {} times: background work yields", 1 << turns.MOST_STEPS),
    ("operating.md", "After {:,} tokens (cached ones", session_service.FIRST_STEP_TOKENS),
    ("security.md", "holds a connection for {} s", options.HANDSHAKE_MS // 1000),
    ("security.md", "head of more than {:.0f} KiB", default("max_head_bytes") / (1 << 10)),
    ("security.md", "sends a body of more than {:.0f} MiB", default("max_body_bytes") / (1 << 20)),
    ("security.md", "in flight hold {:.0f} MiB", default("max_inflight_bytes") / (1 << 20)),
    ("security.md", "takes more than {:.0f} s to send", default("receive_timeout_s")),
    ("security.md", "connection idle for {:.0f} s", default("idle_timeout_s")),
    ("security.md", "full buffer unread for {:.0f} s", default("client_stall_s")),
    ("security.md", "when {:.0f} pieces of a generation", default("max_unread_deltas")),
    ("security.md", "beyond {:.0f} sequences of all", default("max_inflight")),
    ("security.md", "a step waits for {:.0f} ms", default("mask_wait_ms")),
    ("security.md", "a request has {:.0f} s on a worker", default("mask_limit_s")),
    ("security.md", "400 after {:,} members", content_encoding.MAX_GZIP_MEMBERS),
    ("security.md", "up to {} KiB are buffered", connection.WRITE_BUFFER_BYTES >> 10),
    ("security.md", "| {:,} characters | thread above 1,000", grammar.MAX_GBNF_CHARS),
    ("security.md", "matched with each token | {0[0]} of {0[1]:,} characters", _STOP),
    ("security.md", "400 beyond {:,} prompt tokens", choice_planner.MAX_STARTED_TOKENS),
]


@pytest.mark.parametrize(("document", "text", "value"), LIMITS)
def test_limits_are_those_of_the_code(document: str, text: str, value: object) -> None:
    assert text.format(value) in (ROOT / "docs" / document).read_text(encoding="utf-8")


def test_the_page_for_newcomers_names_every_document() -> None:
    page = ROOT / "docs/README.md"
    named = {(page.parent / link).resolve() for link in _LINK.findall(page.read_text())}
    documents = {each for each in DOCUMENTS if each.parent.name != "measured"} - {page}
    assert documents - named == set()


def rows_of_fields(section: str) -> dict[str, str]:
    """The rows of the tables of fields of docs/api.md that follow a heading, by their kind."""
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8").partition(section)[2]
    rows: dict[str, str] = {}
    kind = ""
    for first, fields in re.findall(r"^\| ([a-z ]*?) ?\| (`[^|]*)\|", text, re.MULTILINE):
        kind = first or kind
        rows.setdefault(kind, "")
        rows[kind] += fields
        if kind == "refused":
            break
    return rows


@pytest.mark.parametrize(
    ("section", "body"),
    [
        ("## Parameters", ChatRequest),
        ("## Responses", ResponsesRequest),
        ("## Messages", MessagesRequest),
    ],
)
def test_fields_without_effect_stand_in_their_rows(
    section: str, body: type[body_reader.RequestBody]
) -> None:
    rows = rows_of_fields(section)
    missing = []
    hint = Hint.__metadata__[0].description
    for name, field in body.model_fields.items():
        kinds = {type(each) for each in field.metadata}
        if body_reader.Only in kinds:
            kind = "refused"
        elif Ignorable in kinds:
            kind = "ignored"
        elif field.description == hint:
            kind = "no effect"
        else:
            continue
        if f"`{name}`" not in rows[kind]:
            missing.append(f"{name}: {kind}")
    assert missing == []


def section(heading: str) -> str:
    """What docs/api.md says below a heading of the second level."""
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("headings", "body"),
    [
        (["Parameters"], ChatRequest),
        (["Parameters"], CompletionRequest),
        (["Responses", "Parameters"], ResponsesRequest),
        (["Messages", "Parameters"], MessagesRequest),
        (["Tokens"], TokenizeRequest),
        (["Tokens"], DetokenizeRequest),
    ],
)
def test_every_field_of_a_body_stands_below_its_endpoint(
    headings: list[str], body: type[body_reader.RequestBody]
) -> None:
    named = set(re.findall(r"`([a-z_0-9]+)", "".join(map(section, headings))))
    assert set(body.model_fields) - named == set()
