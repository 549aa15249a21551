"""What this process tells Python's garbage collector, once it is ready to serve."""

from __future__ import annotations

import gc

ALLOCATIONS = 10_000
"""So many more objects made than freed until the collector looks at the youngest: what is left in
cycles by then is a megabyte or two. Python's own figure has it look 14 times as often."""


def spare_the_collector() -> None:
    """What is here now stays: it is never looked at again.

    The modules of a worker alone are 190,000 objects, and a full look at them takes a tenth of a
    second, in the middle of everybody's streams. What requests leave behind is freed by counting
    references; cycles are rare.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, 10, 10)
