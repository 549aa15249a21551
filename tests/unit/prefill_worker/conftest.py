"""A prefill worker and a decode worker that it may meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.worker_harness import Clock, DecodeBench, PrefillBench


@pytest.fixture
def d() -> Iterator[DecodeBench]:
    """Its pool and its name are all that is asked of it."""
    bench = DecodeBench("d", Clock())
    yield bench
    bench.close()


@pytest.fixture
def p() -> Iterator[PrefillBench]:
    """The worker under test; nothing of it may be left when the test ends."""
    bench = PrefillBench("p", Clock())
    yield bench
    assert bench.scheduler.sequences == []
    assert bench.scheduler.blocks.num_pinned == 0, "blocks were left behind"
    assert bench.source.num_open == bench.source.num_outstanding == 0
    bench.scheduler.blocks.check()
    bench.close()
