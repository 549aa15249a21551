"""Flows share the network cards of workers."""

from __future__ import annotations

import pytest

from simulator.event_queue import EventQueue
from simulator.network import Network


def arrivals(*flows: tuple[float, int, int, float]) -> list[float]:
    """When flows `(begin, source, sink, bytes)` among three workers of 100 B/s arrive."""
    queue = EventQueue()
    network = Network(queue, [100.0] * 3, latency_s=0.5)
    times = [0.0] * len(flows)

    def note(number: int) -> None:
        times[number] = queue.now

    for number, (begin, source, sink, size) in enumerate(flows):
        queue.at(begin, network.send, source, sink, size, lambda number=number: note(number))
    queue.run()
    return times


def test_a_lone_flow_has_the_whole_bandwidth() -> None:
    assert arrivals((1.0, 0, 1, 200.0)) == [3.5]


def test_flows_of_a_source_share_its_card() -> None:
    assert arrivals((0.0, 0, 1, 100.0), (0.0, 0, 2, 100.0)) == [2.5, 2.5]


def test_flows_to_a_sink_share_its_card_until_one_has_arrived() -> None:
    assert arrivals((0.0, 0, 2, 100.0), (0.5, 1, 2, 100.0)) == pytest.approx([2.0, 2.5])


def test_directions_do_not_share() -> None:
    assert arrivals((0.0, 0, 1, 100.0), (0.0, 1, 0, 100.0)) == [1.5, 1.5]


def test_nothing_arrives_at_once_but_for_the_latency() -> None:
    assert arrivals((0.0, 0, 1, 0.0)) == [0.5]
