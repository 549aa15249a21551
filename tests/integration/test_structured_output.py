"""The demo model's JSON conforms to its schemas: apart and alone, streamed and whole, and where a
worker dies in the middle. It is the same text on every path: in bf16, a CPU gives a sequence the
same bits in any batch and chunks, up to contexts of 1,024 tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from protocol.messages import Role
from tests.effort import NIGHTLY, some
from tests.faults.faulty_fleet import FaultyFleet, faulty_fleet
from tests.http_client import HTTP
from tests.integration.fleets import all_counters, complete, wait_for
from tests.integration.schemas import make_schemas
from tests.integration.structured import CONCURRENCY, ask, check

SCHEMAS = some(make_schemas(), 20)
TEXTS: dict[int, str] = {}
"""What each schema gave first, by its number."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[FaultyFleet]:
    with faulty_fleet(prefill=1, decode=2) as fleet:
        yield fleet


@pytest.mark.parametrize("path", ["apart", "alone"])
def test_the_text_conforms_to_its_schema_and_is_the_same_on_every_path(
    fleet: FaultyFleet, path: str
) -> None:
    fleet.revive()
    if path == "alone":
        fleet.kill("prefill-1")
        wait_for("the router to notice", lambda: not fleet.is_known("prefill-1"))
    before = num_handoffs(fleet)
    asked = requests(range(len(SCHEMAS)), turn=path == "alone")
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        texts = list(pool.map(lambda each: ask(fleet.url, SCHEMAS[each[0]], *each), asked))
    compare(asked, texts)
    handoffs = num_handoffs(fleet) - before
    assert handoffs > len(asked) // 2 if path == "apart" else handoffs == 0


def num_handoffs(fleet: FaultyFleet) -> int:
    return sum(each["handoffs"] for each in all_counters(fleet.fleet).values())


def test_only_allowed_tokens_come_and_no_bad_word(fleet: FaultyFleet) -> None:
    fleet.revive()
    prompt = list(range(20, 60))
    free = complete(fleet.fleet, prompt, max_tokens=12)["choices"][0]
    wanted = sorted({free["token_ids"][0], 70, 80})
    answer = complete(fleet.fleet, prompt, max_tokens=12, allowed_token_ids=wanted)
    assert answer["choices"][0]["token_ids"][0] == free["token_ids"][0]
    assert set(answer["choices"][0]["token_ids"]) <= set(wanted)
    word = free["text"].split()[-1]
    answer = complete(fleet.fleet, prompt, max_tokens=12, bad_words=[word])
    assert f" {word}" not in answer["choices"][0]["text"]


def test_a_retry_in_the_middle_goes_on_with_the_same_text(fleet: FaultyFleet) -> None:
    """A decode worker dies in each half of the schemas, under whatever it then generates."""
    half = len(SCHEMAS) // 2
    texts: list[str] = []
    for start in (0, half):
        asked = requests(range(start, start + half), turn=0)
        fleet.revive()
        all_asked = num_asked(fleet) + len(asked)
        fleet.arm(fleet.names(Role.DECODE), "decode", 20)
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = [
                pool.submit(ask, fleet.url, SCHEMAS[number], number, stream)
                for number, stream in asked
            ]
            held = fleet.held("decode")
            wait_for("all to be asked", lambda n=all_asked: num_asked(fleet) >= n)
            fleet.kill(held)
            texts += [each.result() for each in answers]
    compare(requests(range(len(SCHEMAS)), turn=0), texts)
    assert total(fleet, "retries") >= 2, "of each worker one at least"


def requests(numbers: Iterable[int], turn: int) -> list[tuple[int, bool]]:
    """Numbers of schemas, and whether the answer is streamed: every other one, beginning by turns
    with the first or the second; nightly each is asked for streamed and whole."""
    both = [(number, stream) for number in numbers for stream in (True, False)]
    return both if NIGHTLY else [each for each in both if each[1] == ((each[0] + turn) % 2 == 0)]


def num_asked(fleet: FaultyFleet) -> float:
    """First attempts."""
    return total(fleet, "attempts") - total(fleet, "retries")


def total(fleet: FaultyFleet, name: str) -> float:
    """A counter of the router, over all labels."""
    metrics = HTTP.get(f"{fleet.url}/metrics").raise_for_status().text
    pattern = rf"^baton_router_{name}_total(?:{{.*}})? (\S+)"
    return sum(map(float, re.findall(pattern, metrics, re.MULTILINE)))


def compare(asked: list[tuple[int, bool]], texts: list[str]) -> None:
    """Every text conforms, and is what it was on every other path, streamed or whole."""
    for (number, _stream), text in zip(asked, texts, strict=True):
        check(SCHEMAS[number], text)
        assert TEXTS.setdefault(number, text) == text
    numbers = {number for number, _stream in asked}
    assert len(set(texts)) > len(numbers) // 2, "the schemas should leave something to choose"
