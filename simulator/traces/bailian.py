"""Traces of Alibaba's Bailian service: Mooncake's fields, and the conversations of requests.

Times are in seconds, and blocks have 16 tokens. A request names the one that it continues by
`parent_chat_id`. The trace does not say when answers ended, so a turn starts at its recorded time,
or when the former turn has ended if that is later. If several requests continue the same one, the
first of them is its next turn, and the others begin sessions of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from simulator.traces.hash_ids import BlockIds
from simulator.traces.lines import MAX_ID, TraceLine
from simulator.traces.sessions import BlockRuns, Runs, Session, Turn, runs_of, with_output

PARENT = "parent_chat_id"
_NONE = -1


@dataclass(frozen=True)
class _Request:
    at_s: float
    chat: int
    parent: int
    num_prompt: int
    num_output: int
    runs: Runs


def sessions(lines: Iterable[TraceLine]) -> Iterator[Session]:
    """The sessions, in order of their beginnings. Raises ConfigError, naming the line."""
    ids = BlockIds()
    requests = sorted((_request(line, ids) for line in lines), key=lambda each: each.at_s)
    for number, course in enumerate(_courses(requests)):
        start_s = course[0].at_s - requests[0].at_s
        yield Session(f"b{number}", start_s, _turns(course, ids.block_tokens))


def _request(line: TraceLine, ids: BlockIds) -> _Request:
    num_prompt = line.integer("input_length")
    return _Request(
        line.number("timestamp"),
        line.integer("chat_id", 0, MAX_ID),
        line.integer(PARENT, _NONE, MAX_ID),
        num_prompt,
        max(1, line.integer("output_length", minimum=0)),
        runs_of(ids.read(line, num_prompt)),
    )


def _courses(requests: Iterable[_Request]) -> list[list[_Request]]:
    """The requests of each session one after the other."""
    courses: list[list[_Request]] = []
    by_last: dict[int, list[_Request]] = {}
    for each in requests:
        course = by_last.pop(each.parent, None)
        if course is None:
            course = []
            courses.append(course)
        course.append(each)
        by_last[each.chat] = course
    return courses


def _turns(course: list[_Request], block_tokens: int) -> tuple[Turn, ...]:
    found = []
    for index, each in enumerate(course):
        runs = each.runs
        if each.num_prompt % block_tokens:
            runs = _without_last(runs)  # which the output completes, so that it gets another id
        if index + 1 < len(course):
            runs = _with_output(each, runs, course[index + 1])
        blocks = BlockRuns(0, block_tokens, runs)
        not_before_s = each.at_s - course[0].at_s
        found.append(Turn(0.0, each.num_prompt, each.num_output, blocks, (), not_before_s))
    return tuple(found)


def _without_last(runs: Runs) -> Runs:
    *others, (first, count) = runs
    return (*others, (first, count - 1)) if count > 1 else tuple(others)


def _with_output(each: _Request, runs: Runs, following: _Request) -> Runs:
    """Its blocks, and those of its output if the next prompt is long enough to contain it."""
    if following.num_prompt < each.num_prompt + each.num_output:
        return runs
    return with_output(runs, following.runs)
