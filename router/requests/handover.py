"""Which requests a draining decode worker is asked to hand over now.

Pure. A request leaves only for a worker that takes it whole and has the blocks free for what it
is by now: elsewhere it would wait, where it is it goes on. The room is that of the last load
reports, with what was sent since; whoever finds none is looked at again with the next news.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.messages import HandOver
from router.fleet.worker import Worker
from router.requests.generation import Generation


def orders(generations: Iterable[Generation], targets: Sequence[Worker]) -> list[HandOver]:
    """What to tell the workers of those that may leave, given the decode workers that are ready."""
    free = {target: target.free_blocks for target in targets}
    found = []
    for generation in generations:
        attempt = generation.attempt
        if attempt is None or not attempt.may_leave:
            continue
        fitting = [each for each in targets if generation.max_tokens <= each.info.max_context]
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
