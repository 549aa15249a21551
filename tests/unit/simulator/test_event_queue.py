"""Events run in the order of their times, and in a fixed order at one moment."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.event_queue import Arrival, EventQueue


def test_at_one_moment_arrivals_come_first_then_messages_then_the_ends_of_steps() -> None:
    queue, ran = EventQueue(), list[str]()
    queue.step_end(1.0, 3, ran.append, "worker 3")
    queue.step_end(1.0, 0, ran.append, "worker 0")
    queue.at(1.0, ran.append, "message a")
    queue.at(1.0, ran.append, "message b")
    queue.at(0.5, ran.append, "earlier")
    names = ("arrival a", "arrival b")
    queue.arrive([(1.0, ran.append, (name,)) for name in names])
    queue.run()
    assert ran == ["earlier", *names, "message a", "message b", "worker 0", "worker 3"]
    assert queue.num_run == len(ran)


def test_a_beat_comes_before_the_events_of_its_moment_and_ends_with_the_last_event() -> None:
    queue, ran = EventQueue(), list[tuple[str, float]]()
    queue.every(1.0, lambda: ran.append(("beat", queue.now)))
    for time in (0.5, 2.0, 2.5):
        queue.at(time, lambda: ran.append(("event", queue.now)))
    queue.run()
    assert ran == [("event", 0.5), ("beat", 1.0), ("beat", 2.0), ("event", 2.0), ("event", 2.5)]


def test_an_arrival_is_queued_when_the_one_before_it_runs() -> None:
    queue, taken = EventQueue(), list[float]()

    def arrivals() -> Iterator[Arrival]:
        for time in (1.0, 2.0, 2.0, 7.0):
            taken.append(time)
            yield time, seen.append, (time,)

    seen: list[float] = []
    queue.arrive(arrivals())
    assert len(queue) == len(taken) == 1
    queue.at(1.5, lambda: seen.append(len(taken)))
    queue.run()
    assert seen == [1.0, 2, 2.0, 2.0, 7.0]
    assert queue.now == 7.0
