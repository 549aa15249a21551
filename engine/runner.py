"""The interface of a runner, and the results of a step for the sequences that it samples.

Imports no torch, so that the loop runs with any runner: a model (`engine.model_runner`), a fake one
in tests, or a simulated one that only advances a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from engine.fences import Fence
from protocol.errors import GRAMMAR_TOO_SLOW, NO_TOKEN_ALLOWED
from scheduling.batch import Batch


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """The chosen token; `logprob` is None and `top` empty if the row asked for neither."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RowFailure:
    """Why a sequence got no token. If the request itself is at fault, `code` says why, and no other
    worker would succeed."""

    reason: str
    code: str = ""


@dataclass(frozen=True)
class RowLate:
    """The sequence gets no token in this step, because its grammar's mask is not ready."""


LATE = RowLate()
NOT_FINITE = RowFailure("the model gave no finite logits")
NOTHING_LEFT = RowFailure(
    "nothing can be chosen: its grammar or the tokens allowed, forbidden and biased leave no token",
    code=NO_TOKEN_ALLOWED,
)
TOO_SLOW = RowFailure(
    "the masks of its grammar take too long to compute: make the grammar smaller or less ambiguous",
    code=GRAMMAR_TOO_SLOW,
)

Row = SampledToken | RowFailure | RowLate
"""The result of a step for one sequence."""


class StepAhead(Protocol):
    """A step that was launched ahead of its result. Its keys and values are in the pool once
    `stored` is passed."""

    @property
    def stored(self) -> Fence:
        """The fence behind all that the step writes to the pool."""

    def read(self) -> list[Row]:
        """The result as `Runner.sample` gives it; waits for this step, but no later one."""


LaunchedT = TypeVar("LaunchedT")
StepT = TypeVar("StepT", bound=StepAhead)


class Runner(Protocol[LaunchedT, StepT]):
    """Computes batches on one device, in order; used by one thread."""

    def launch(self, batch: Batch) -> tuple[LaunchedT, Fence]:
        """Compute the batch's tokens. Returns the input of `sample` for `batch.sampled`, and the
        fence behind it; the device may still be computing."""

    def sample(self, batch: Batch, launched: LaunchedT, /) -> list[Row]:
        """A token for each of `batch.sampled`, in order; waits for the device. A row from which no
        token can be chosen fails its own sequence only."""

    def launch_ahead(self, batch: Batch, before: StepT | None) -> StepT:
        """Compute the batch's tokens and choose the next ones, without waiting for the device.

        `before` is the step under way, if any; tokens that the host does not know yet are taken
        from it. No sequence's sampling may need such a token, or a grammar's mask.
        """

    def wait(self) -> None:
        """Wait until the device has finished its queued work."""


AnyRunner = Runner[Any, Any]
