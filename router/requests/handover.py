"""The requests that a draining decode worker is asked to hand over now.

Pure. A request moves only to a worker that accepts its full length and has enough free blocks for
its current length. On any other worker it would have to wait, but where it is, it makes progress.
Free blocks are those of the last load reports, minus the requests sent since. A request for which
no worker has room is reconsidered when the next report arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.messages import HandOver
from router.fleet.worker import Worker
from router.requests.machine.generation import Generation


def orders(generations: Iterable[Generation], targets: Sequence[Worker]) -> list[HandOver]:
    """The hand-over orders for requests that may leave, given the ready decode workers."""
    free = {target: target.free_blocks for target in targets}
    found = []
    for generation in generations:
        attempt = generation.attempt
        if attempt is None or not attempt.may_leave:
            continue
        fitting = [each for each in targets if generation.needed_context <= each.info.max_context]
        target = max(fitting, key=free.__getitem__, default=None)
        if target is None:
            continue
        num_blocks = -(-generation.num_tokens // target.info.block_size)
        if num_blocks <= free[target]:
            free[target] -= num_blocks
            found.append(_order(generation, attempt.number))
    return found


def _order(generation: Generation, attempt: int) -> HandOver:
    return HandOver(
        request_id=generation.request.request_id,
        attempt=attempt,
        next_attempt=generation.attempt_number + 1,
    )
