"""The states of a generation, of which it has one at a time, and the actions that follow events.

Pure. A state says what the owner of a `Generation` does, or waits for, until the next event. Two
states are in other files: `Attempt`, while workers run the request, and `Searching`, during the
search for a stream that another router began.
"""

from __future__ import annotations

import msgspec

from protocol.errors import RequestError, ServiceError
from router.fleet.worker import Worker
from router.requests.interface import TokenDelta
from router.requests.machine.attempt import Attempt, Send
from router.requests.machine.resumption import Searching


class Failure(msgspec.Struct, frozen=True):
    """Why an attempt ended without finishing its generation. `lacks_room`: only because no worker
    has room now. `code`: set if the request itself is at fault, see `UnusableConstraint`.
    `computed_tokens` of the prompt had been computed."""

    reason: str
    retryable: bool = True
    lacks_room: bool = False
    code: str = ""
    computed_tokens: int = 0


class Placing(msgspec.Struct, frozen=True):
    """The next attempt is to be placed. `source` is the decode worker that hands the request over:
    it keeps the KV of all tokens but the newest."""

    source: Worker | None = None


class Failed(msgspec.Struct, frozen=True):
    """An attempt failed. Once the client has all earlier tokens, `recover` decides what follows."""

    failure: Failure


class Pausing(msgspec.Struct, frozen=True):
    """The next attempt waits for `pause_s`. If a worker that is to keep the request was pinged, the
    attempt then waits for the answer: if that worker dies after it, this counts as another
    death."""

    pause_s: float
    pinged: tuple[Worker, int] | None
    reason: str


class AwaitingRoom(msgspec.Struct, frozen=True):
    """A decode worker must be ready that accepts the request."""

    reason: str


class Complete(msgspec.Struct, frozen=True):
    """All tokens have come; the client does not have the last ones yet."""


class Over(msgspec.Struct, frozen=True):
    """The end. `outcome` is "finished", "failed", or "closed" if the client went away."""

    outcome: str
    error: RequestError | ServiceError | None = None


State = Searching | Placing | Attempt | Failed | Pausing | AwaitingRoom | Complete | Over


class AttemptEnded(msgspec.Struct, frozen=True):
    """Note that an attempt failed; `kind` is the label of its failure, "" if no worker failed."""

    attempt: Attempt
    failure: Failure
    kind: str = ""


class Probe(msgspec.Struct, frozen=True):
    """Ping a worker, and tell the number of that ping to `FailureHistory.on_probe`."""

    worker: Worker


class AwaitFirstToken(msgspec.Struct, frozen=True):
    """Call `on_overdue` when the attempt's first token has had its time to come."""

    attempt: Attempt


class CountStale(msgspec.Struct, frozen=True):
    """Count a message that came too late, came twice, or came from the wrong sender."""


Action = TokenDelta | Send | AttemptEnded | Probe | AwaitFirstToken | CountStale
"""A `TokenDelta` goes to the client, after the earlier deltas."""
