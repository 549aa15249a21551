"""The states of a generation, of which it has one at a time, and the actions that follow events.

Pure. A state says what the owner of a `Generation` does, or waits for, until the next event. Two
states are in other files: `Attempt`, while workers run the request, and `Searching`, during the
search for a stream that another router began.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import RequestError, ServiceError
from router.fleet.worker import Worker
from router.requests.interface import TokenDelta
from router.requests.machine.attempt import Attempt, Send
from router.requests.machine.resumption import Searching


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended without finishing its generation. `lacks_room`: only because no worker
    has room now. `code`: set if the request itself is at fault, see `UnusableConstraint`.
    `computed_tokens` of the prompt had been computed."""

    reason: str
    retryable: bool = True
    lacks_room: bool = False
    code: str = ""
    computed_tokens: int = 0


@dataclass(frozen=True)
class Placing:
    """The next attempt is to be placed. `source` is the decode worker that hands the request over:
    it keeps the KV of all tokens but the newest."""

    source: Worker | None = None


@dataclass(frozen=True)
class Failed:
    """An attempt failed. Once the client has all earlier tokens, `recover` decides what follows."""

    failure: Failure


@dataclass(frozen=True)
class Pausing:
    """The next attempt waits for `pause_s`. If a worker that is to keep the request was pinged, the
    attempt then waits for the answer: if that worker dies after it, this counts as another
    death."""

    pause_s: float
    pinged: tuple[Worker, int] | None
    reason: str


@dataclass(frozen=True)
class AwaitingRoom:
    """A decode worker must be ready that accepts the request."""

    reason: str


@dataclass(frozen=True)
class Complete:
    """All tokens have come; the client does not have the last ones yet."""


@dataclass(frozen=True)
class Over:
    """The end. `outcome` is "finished", "failed", or "closed" if the client went away."""

    outcome: str
    error: RequestError | ServiceError | None = None


State = Searching | Placing | Attempt | Failed | Pausing | AwaitingRoom | Complete | Over


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """Note that an attempt failed; `kind` is the label of its failure, "" if no worker failed."""

    attempt: Attempt
    failure: Failure
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Ping a worker, and tell the number of that ping to `FailureHistory.on_probe`."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class AwaitFirstToken:
    """Call `on_overdue` when the attempt's first token has had its time to come."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class CountStale:
    """Count a message that came too late, came twice, or came from the wrong sender."""


Action = TokenDelta | Send | AttemptEnded | Probe | AwaitFirstToken | CountStale
"""A `TokenDelta` goes to the client, after the earlier deltas."""
