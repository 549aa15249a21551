"""Who passes the gate, who has to come back, and when."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry

from gateway.admission.address_shares import ALONE_AFTER_S
from gateway.admission.gate import Gate
from gateway.admission.recent import WINDOW_S, RecentCount
from http_kit.tenant import EVERYBODY, KeyTerms, Tenant
from protocol.errors import MAX_RETRY_S, InvalidRequest, Overloaded, TooManyRequests

A, B = Tenant(KeyTerms("a"), "a"), Tenant(KeyTerms("b"), "b")
SMALL = Tenant(KeyTerms("small", inflight=2), "small")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_full_router_refuses_every_caller() -> None:
    gate = Gate(2, Clock())
    with gate.passing(EVERYBODY), gate.passing(A):
        assert gate.in_flight == 2
        with pytest.raises(Overloaded, match="2 sequences are in flight"), gate.passing(B):
            pass
        assert gate.in_flight == 2
    assert gate.in_flight == 0
    with gate.passing(B):
        pass


def places_until_refused(gate: Gate, held: ExitStack, address: str) -> int:
    """How many requests of an address pass, one after the other, before one is refused."""
    for number in range(gate.max_inflight):
        try:
            held.enter_context(gate.passing(EVERYBODY, address=address))
        except TooManyRequests as refused:
            return number if f"this address has {number} " in str(refused) else -1
    return gate.max_inflight


def test_an_address_leaves_room_for_others_while_there_are_others() -> None:
    gate = Gate(90, Clock())
    with gate.passing(EVERYBODY, address="b"):
        pass
    with ExitStack() as held:
        assert places_until_refused(gate, held, "a") == 80, "8 times as many as it leaves"
        assert places_until_refused(gate, held, "b") == 8
        with gate.passing(EVERYBODY, address="c"):
            assert gate.in_flight == 89, "there is room for one more"
        with gate.passing(A, address="a"):
            pass
    assert gate.in_flight == 0


def test_an_address_that_asks_alone_has_every_place() -> None:
    """As a proxy has, from which all requests come."""
    clock = Clock()
    gate = Gate(90, clock)
    with gate.passing(EVERYBODY, address="b"):
        pass
    clock.now += ALONE_AFTER_S + 1
    with ExitStack() as held:
        for _ in range(90):
            held.enter_context(gate.passing(EVERYBODY, address="a"))


def test_an_address_that_took_all_while_alone_gives_up_places_to_the_next_one() -> None:
    gate = Gate(90, Clock())
    first = ExitStack()
    with ExitStack() as held, first:
        for _ in range(10):
            first.enter_context(gate.passing(EVERYBODY, address="a"))
        for _ in range(80):
            held.enter_context(gate.passing(EVERYBODY, address="a"))
        with pytest.raises(Overloaded), gate.passing(EVERYBODY, address="b"):
            pass
        first.close()
        with pytest.raises(TooManyRequests), gate.passing(EVERYBODY, address="a"):
            pass
        assert places_until_refused(gate, held, "b") == 8


def test_a_request_that_is_alone_may_be_as_wide_as_the_router() -> None:
    gate = Gate(4, Clock())
    for address in ("b", "a"):
        with gate.passing(EVERYBODY, address=address) as ticket:
            ticket.widen(4)
            assert gate.in_flight == 4


def test_the_gate_for_text_has_places_of_its_own() -> None:
    gate = Gate(9, Clock())
    with gate.for_text.passing(EVERYBODY, address="b"):
        pass
    with ExitStack() as held:
        assert places_until_refused(gate.for_text, held, "a") == 8
        for _ in range(9):
            held.enter_context(gate.passing(EVERYBODY, address="a"))


def test_refusals_are_counted_by_their_reason_from_the_start() -> None:
    registry = CollectorRegistry()
    gate = Gate(2, Clock(), registry=registry)

    def count(reason: str) -> float | None:
        return registry.get_sample_value("baton_http_gate_refused_total", {"reason": reason})

    assert (count("full"), count("key_limit")) == (0, 0)
    with gate.passing(SMALL), gate.passing(SMALL):
        with pytest.raises(TooManyRequests), gate.passing(SMALL):
            pass
        for _ in range(2):
            with pytest.raises(Overloaded), gate.passing(A):
                pass
    assert (count("full"), count("key_limit")) == (2, 1)


def test_refusals_are_logged_with_the_name_of_the_key(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    gate = Gate(100, clock)
    with gate.passing(SMALL), gate.passing(SMALL):
        for _ in range(5):
            with pytest.raises(TooManyRequests), gate.passing(SMALL):
                pass
        clock.now += 1.0
        with pytest.raises(TooManyRequests), gate.passing(SMALL):
            pass
    told = "key small has 2 sequences in flight; requests refused since the last such line: "
    assert [each.getMessage() for each in caplog.records] == [told + "1", told + "5"]


def test_one_of_several_keys_has_half_of_the_room() -> None:
    num_keys = 1
    gate = Gate(5, Clock(), lambda: num_keys)
    assert gate.limit_of(A) is None
    num_keys = 2
    assert gate.limit_of(A) == 2
    assert gate.limit_of(EVERYBODY) is None
    with gate.passing(A), gate.passing(A):
        with pytest.raises(TooManyRequests, match="2 sequences of this key"), gate.passing(A):
            pass
        with gate.passing(B), gate.passing(B):
            assert gate.in_flight == 4


def test_a_key_file_sets_the_limit_of_its_key() -> None:
    gate = Gate(100, Clock())
    with gate.passing(SMALL):
        limit = gate.rate_limit(SMALL)
        assert (limit.limit, limit.remaining, limit.reset_s) == (2, 1, 0)
        with gate.passing(SMALL), pytest.raises(TooManyRequests), gate.passing(SMALL):
            pass
    limit = gate.rate_limit(SMALL)
    assert (limit.limit, limit.remaining, limit.reset_s) == (2, 2, 0), "all have ended"
    assert gate.rate_limit(A) is None


def test_every_sequence_counts_and_none_is_left() -> None:
    gate = Gate(10, Clock())
    with gate.passing(EVERYBODY) as ticket:
        ticket.widen(8)
        assert gate.in_flight == 8
        with gate.passing(EVERYBODY) as other:
            with pytest.raises(Overloaded):
                other.widen(3)
            assert gate.in_flight == 9
            with pytest.raises(InvalidRequest, match="starts 11 sequences; 10 may"):
                other.widen(11)
    assert gate.in_flight == 0


def test_what_can_never_fit_is_the_callers_mistake() -> None:
    gate = Gate(10, Clock())
    with gate.passing(SMALL) as ticket, pytest.raises(InvalidRequest, match="3 sequences; 2 may"):
        ticket.widen(3)


def refused_after(gate: Gate) -> int:
    with pytest.raises(Overloaded) as caught, gate.passing(EVERYBODY):
        pass
    return caught.value.retry_after_s


def test_the_wait_follows_the_rate_of_ends_and_the_number_of_refused() -> None:
    clock = Clock()
    gate = Gate(20, clock)
    for _ in range(20):  # two in a second
        with gate.passing(EVERYBODY):
            pass
        clock.now += 0.5
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(gate.passing(EVERYBODY))
        waits = [refused_after(gate) for _ in range(9)]
        assert waits == [1, 2, 2, 3, 3, 4, 4, 5, 5]
        clock.now += WINDOW_S + 1
        assert refused_after(gate) == WINDOW_S, "nothing ended lately"
        assert refused_after(gate) == 2 * WINDOW_S
        for _ in range(10):
            longest = refused_after(gate)
        assert longest == MAX_RETRY_S


def test_counts_of_the_last_seconds_only() -> None:
    count = RecentCount()
    count.add(5.0, 2)
    count.add(9.9)
    assert count.total(14.9) == 3
    assert count.total(15.0) == 1
    assert count.total(20.0) == 0
    count.add(1000.0)
    assert count.total(1000.5) == 1
    assert count.total(5000.0) == 0
