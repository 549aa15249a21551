"""What routers record (`router.recording`): one JSON object a line for each request that ended.

Files of several routers may follow each other. A request of a session is its next turn if the
session's last turn had ended; requests beside it begin sessions of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from router.recording.recorder import FORMAT, VERSION
from simulator.traces.lines import TraceLine
from simulator.traces.sessions import BlockRuns, Runs, Session, Turn, runs_of, with_output

MAX_US = 1 << 53
_MOST = 1 << 31  # the largest priority


@dataclass(frozen=True)
class _Request:
    began_us: int
    ended_us: int
    session: str
    num_prompt: int
    num_output: int
    runs: Runs
    block_tokens: int
    share: str
    priority: int


@dataclass
class _Course:
    """Requests that follow each other."""

    name: str
    requests: list[_Request] = field(default_factory=list)


def sessions(lines: Iterable[TraceLine]) -> Iterator[Session]:
    """The sessions, in order of their beginnings. Raises ConfigError, naming the line."""
    requests = sorted(_requests(lines), key=lambda each: (each.began_us, each.ended_us))
    first_us = requests[0].began_us if requests else 0
    for course in _courses(requests):
        first = course.requests[0]
        start_s = (first.began_us - first_us) / 1e6
        turns = _turns(course.requests)
        yield Session(course.name, start_s, turns, first.share, first.priority)


def _requests(lines: Iterable[TraceLine]) -> Iterator[_Request]:
    chains, block_tokens = _Chains(), 0
    for line in lines:
        if FORMAT in line:
            line.integer(FORMAT, VERSION, VERSION)
            former, block_tokens = block_tokens, line.integer("block_tokens", minimum=0)
            if former and block_tokens and block_tokens != former:
                raise line.wrong("block_tokens", f"{former}, as in the lines before")
            block_tokens = block_tokens or former
            continue
        began_us = line.integer("at_us", minimum=0, maximum=MAX_US)
        num_prompt = line.integer("in")
        numbers = chains.numbers(line, num_prompt // block_tokens if block_tokens else 0)
        yield _Request(
            began_us,
            began_us + line.integer("took_us", minimum=0, maximum=MAX_US),
            line.text("session") if "session" in line else "",
            num_prompt,
            max(1, line.integer("out", minimum=0)),
            runs_of(numbers),
            block_tokens,
            line.text("share") if "share" in line else "",
            line.integer("priority", -_MOST, _MOST) if "priority" in line else 0,
        )


class _Chains:
    """Numbers of blocks, in the order in which they came. A block's digest stands for its
    predecessors as well."""

    def __init__(self) -> None:
        self._numbers: dict[str, tuple[int, str]] = {}  # number and predecessor, by digest

    def numbers(self, line: TraceLine, num_blocks: int) -> list[int]:
        """The numbers of a prompt's blocks. Predecessors that no line has named are new blocks."""
        after = line.text("after") if "after" in line else ""
        new = line.texts("blocks") if "blocks" in line else []
        held = num_blocks - len(new)
        if held < 0 or bool(held) != bool(after):
            raise line.wrong("blocks", f"what {num_blocks:,} blocks lack behind 'after'")
        if after and after not in self._numbers:
            for index in range(held - 1):
                self._add(f"{after}-{index}", f"{after}-{index - 1}" if index else "")
            self._add(after, f"{after}-{held - 2}" if held > 1 else "")
        for digest in new:
            self._add(digest, after)
            after = digest
        found: list[int] = []
        while after:
            number, after = self._numbers[after]
            found.append(number)
        if len(found) != num_blocks:
            raise line.wrong("after", f"the digest of a prompt's block number {held:,}")
        return found[::-1]

    def _add(self, digest: str, predecessor: str) -> None:
        self._numbers.setdefault(digest, (len(self._numbers), predecessor))


def _courses(requests: Iterable[_Request]) -> list[_Course]:
    """The requests of each session one after the other; overlapping requests form courses of their
    own."""
    courses: list[_Course] = []
    of_session: dict[str, list[_Course]] = {}
    for request in requests:
        known = of_session.setdefault(request.session, []) if request.session else []
        over = [each for each in known if each.requests[-1].ended_us <= request.began_us]
        if over:
            latest = max(over, key=lambda each: each.requests[-1].ended_us)
        else:
            latest = _Course(f"r{len(courses)}")
            courses.append(latest)
            known.append(latest)
        latest.requests.append(request)
    return courses


def _turns(requests: list[_Request]) -> tuple[Turn, ...]:
    found, ended_us = [], requests[0].began_us
    for index, each in enumerate(requests):
        runs = each.runs
        if index + 1 < len(requests):
            runs = with_output(runs, requests[index + 1].runs)
        blocks = BlockRuns(0, each.block_tokens, runs) if each.block_tokens else None
        pause_s = (each.began_us - ended_us) / 1e6
        found.append(Turn(pause_s, each.num_prompt, each.num_output, blocks))
        ended_us = each.ended_us
    return tuple(found)
