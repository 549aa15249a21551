"""The index equals what a worker holds, whatever is lost, repeated or late on the way."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.events import CacheEvents
from router.routing.caches import block_lists
from router.routing.caches.cache_index import CacheIndex
from tests.effort import times
from tests.unit.router.routing.caches.truthful_worker import TruthfulWorker, indexed

changes = st.lists(
    st.tuples(
        st.lists(st.integers(0, 7), max_size=3),
        st.lists(st.integers(0, 7), max_size=3),
        st.sampled_from(["deliver", "lose", "repeat"]),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=times(80, 200), deadline=None)
@given(changes)
def test_it_equals_the_worker_whenever_it_claims_to_know(script) -> None:
    """Dumps travel on another connection: an asked one comes at any later time."""
    compare(script)


@settings(
    max_examples=times(80, 200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(changes)
def test_it_equals_the_worker_when_lists_are_indexed_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, script
) -> None:
    monkeypatch.setattr(block_lists, "SLICE", 1)
    compare(script)


def compare(script) -> None:
    worker = TruthfulWorker()
    index = CacheIndex(5.0)
    index.join("w", "i1")
    dumps = [worker.dump()]
    last: CacheEvents | None = None
    delivered = 0
    for stored, removed, fate, dump_comes in script:
        events = worker.change(stored, removed)
        if fate != "lose":
            delivered = events.seq
            if index.apply_events(events):
                dumps.append(worker.dump())
            last = events
        if fate == "repeat" and last is not None and index.apply_events(last):
            dumps.append(worker.dump())
        if dump_comes and dumps and index.apply_dump("w", dumps.pop(0)):
            dumps.append(worker.dump())
        if index.is_synced("w") and delivered == worker.seq and not dumps:
            assert index._workers["w"].hashes == worker.hashes
        if not index.tidy(0.0):
            assert indexed(index) == index._workers["w"].hashes

    final = worker.change([0], [])
    if index.apply_events(final):
        dumps.append(worker.dump())
    while dumps or index.tidy(0.0) or not index.is_synced("w"):
        if index.apply_dump("w", dumps.pop(0) if dumps else worker.dump()):
            dumps.append(worker.dump())
        while index.tidy(0.0):
            pass
    assert index.is_synced("w")
    assert index._workers["w"].hashes == worker.hashes == indexed(index)
