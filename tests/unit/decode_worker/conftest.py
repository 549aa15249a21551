"""A decode worker that must hold nothing after a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.worker_harness import Clock, DecodeBench


@pytest.fixture(params=[False, True], ids=["one by one", "one ahead"])
def d(request: pytest.FixtureRequest) -> Iterator[DecodeBench]:
    bench = DecodeBench("d", Clock(), one_step_ahead=request.param)
    yield bench
    assert bench.scheduler.sequences == []
    assert bench.scheduler.blocks.num_pinned == 0, "blocks were left behind"
    assert bench.model.strays == []
    assert bench.sink.num_open == 0
    bench.scheduler.blocks.check()
    bench.close()
