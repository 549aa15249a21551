"""A fleet in virtual time: what is served, what is left over, when sessions go on."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from math import isclose, isnan

import pytest

from protocol.events import WorkerStats
from protocol.messages import Role
from router.routing.decision import Decision, Query, decide
from router.routing.fleet_view import FleetView
from router.routing.placement import Targets
from simulator.delays import DelayDraws, Delays, MeasuredDelays
from simulator.policies.names import RULES
from simulator.report.summary import Targets as GoodTargets
from simulator.report.summary import summarize
from simulator.traces.sessions import BlockRuns, Session, Turn
from tests.unit.simulator.fleets import BLOCK, served, single, small_fleet, worker_spec


@pytest.mark.parametrize("prefill", [0, 1])
def test_nothing_is_left_over(prefill: int) -> None:
    requests = [single(number / 20, 5 + number, 1 + number % 7) for number in range(30)]
    outcome = served(small_fleet(prefill), *requests)
    assert [each.failure for each in outcome.requests] == [""] * 30
    for worker in outcome.workers:
        assert worker.scheduler.sequences == []
        assert worker.scheduler.blocks.num_pinned == 0
        worker.scheduler.blocks.check()
        assert worker.handoffs.num_open == 0
        assert worker.num_tasks == 0


def test_a_prompt_is_computed_elsewhere_and_its_blocks_are_moved() -> None:
    outcome = served(small_fleet(), single(0.0, 41, 5))
    (request,) = outcome.requests
    assert request.prefill == "prefill-0"
    assert request.sent_bytes == 11 * 1e6
    assert request.arrival < request.prompt_done < request.first_token < request.end
    assert request.exposed_s > 0


def test_an_output_of_one_token_moves_no_blocks_for_nothing() -> None:
    outcome = served(small_fleet(), single(0.0, 41, 1))
    (request,) = outcome.requests
    assert request.end >= request.first_token
    assert [each.scheduler.blocks.num_pinned for each in outcome.workers] == [0, 0, 0]


def test_a_request_that_lacks_no_block_of_its_prompt_goes_on_at_once() -> None:
    """Its decode worker has nothing else to compute, and nobody sends it anything more."""
    fleet = small_fleet(prefill=1, decode=1, policy=RULES["always-split"]())
    runs = ((1000, 5),)
    outcome = served(fleet, single(0.0, 20, 11, runs), single(0.5, 20, 6, runs))
    second = outcome.requests[1]
    assert second.prefill is not None
    assert second.sent_blocks == 0
    assert second.end > second.first_token


def test_a_shared_prefix_is_found_in_the_cache() -> None:
    first, second = single(0.0, 40, 2, ((0, 10),)), single(5.0, 44, 2, ((0, 11),))
    outcome = served(small_fleet(prefill=0, decode=1), first, second)
    assert [each.cached_tokens for each in outcome.requests] == [0, 40]


def test_a_turn_finds_the_output_of_the_turn_before() -> None:
    turns = (
        Turn(0.0, 16, 8, BlockRuns(0, BLOCK, ((0, 6),))),
        Turn(3.0, 32, 4, BlockRuns(0, BLOCK, ((0, 9),))),
    )
    outcome = served(small_fleet(), Session("talk", 1.0, turns))
    first, second = outcome.requests
    assert isclose(second.arrival, first.end + 3.0)
    assert second.prefill is None
    assert second.decode == first.decode
    assert second.cached_tokens == 20  # the last token's KV is not computed


def test_a_session_that_a_turn_starts_begins_at_its_end() -> None:
    child = Session("child", 0.5, (Turn(0.25, 8, 2),))
    outcome = served(small_fleet(), Session("s", 0.0, (Turn(0.0, 8, 2, None, (child,)),)))
    parent, started = outcome.requests
    assert isclose(started.arrival, parent.end + 0.75)


def test_a_prompt_that_fits_nowhere_is_refused_and_its_session_goes_on() -> None:
    turns = (Turn(0.0, 1000, 5), Turn(1.0, 10, 5))
    outcome = served(small_fleet(), Session("s", 0.0, turns))
    refused, later = outcome.requests
    assert refused.failure == "PromptTooLong"
    assert isnan(refused.end)
    assert later.end > 1.0


def test_several_routers_share_the_fleet() -> None:
    requests = [single(number / 20, 5 + number, 4) for number in range(10)]
    outcome = served(small_fleet(num_routers=2), *requests)
    assert {each.router for each in outcome.requests} == {"router-0", "router-1"}
    assert all(each.end > 0 for each in outcome.requests)


def test_equal_seeds_give_equal_results() -> None:
    requests = [single(number / 50, 5 + number, 6) for number in range(20)]
    one, other = (served(small_fleet(decode=4), *requests) for _ in range(2))
    assert [(e.decode, e.end) for e in one.requests] == [(e.decode, e.end) for e in other.requests]


def test_placement_learns_lengths_and_links_and_knows_the_targets() -> None:
    queries: list[Query] = []
    views: list[FleetView] = []

    def noting(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
        queries.append(query)
        views.append(view)
        return decide(view, query, now, rng)

    targets = Targets(500.0, 40.0)
    fleet = small_fleet(policy=noting, targets=targets)
    served(fleet, *(single(float(number), 40, 90) for number in range(4)))
    assert {each.targets for each in queries} == {targets}
    expected = [each.output_tokens for each in queries]
    assert expected == [90] * 4, "no request expects more than it may have"
    pair = views[-1].pairs.find("prefill-0", "decode-1") or views[-1].pairs.find(
        "prefill-0", "decode-2"
    )
    assert pair is not None
    assert pair.ms_per_block == pytest.approx(1.0, rel=0.2), "1 MB at 1 GB/s"


def test_the_time_between_tokens_shows_the_chunks_beside_decodes() -> None:
    alone = single(0.0, 8, 40)
    chunk_s = 0.01 + 0.001 * (1 + 32)  # one decode and a whole chunk
    outcome = served(small_fleet(0, 1), alone, single(0.2, 32, 1))
    found = summarize("f", outcome, GoodTargets(1e6, 1e6)).itl_ms
    assert found is not None
    assert found.p50 == pytest.approx(11.0, rel=0.02)
    assert found.p99 == pytest.approx(chunk_s * 1000, rel=0.02)
    quiet = summarize("f", served(small_fleet(0, 1), alone), GoodTargets(1e6, 1e6)).itl_ms
    assert quiet is not None
    assert quiet.p99 == pytest.approx(11.0, rel=0.02)


def test_clients_wait_for_what_lies_around_the_fleet() -> None:
    around = Delays(request_s=0.5, request_token_s=0.01, answer_s=0.25)
    talk = Session("s", 0.0, (Turn(0.0, 20, 3), Turn(1.0, 20, 3)))
    bare, outcome = (served(small_fleet(delays=each), talk).requests for each in (Delays(), around))
    assert outcome[0].ttft_s == pytest.approx(bare[0].ttft_s + 0.5 + 0.2 + 0.25)
    assert outcome[0].tpot_s == pytest.approx(bare[0].tpot_s)
    assert outcome[1].arrival == pytest.approx(outcome[0].end + 1.0)


def test_measured_delays_are_those_for_the_number_of_other_workers_that_compute() -> None:
    measured = MeasuredDelays(
        placing=((0.5,), (0.75,)),  # the last one holds for higher numbers, too
        sending=((0.25,), (0.125,), (9.0,)),
        first=((9.0,), (1.0,), (9.0,)),
        last=((2.0,), (3.0,), (9.0,)),
    )
    computing = {"a", "b"}
    draws = DelayDraws(
        Delays(message_s=0.125, measured=measured),
        random.Random(0),
        lambda worker: len(computing - {worker}),
    )
    first, last = (draws.answering_s("a", is_last=each) for each in (False, True))
    assert (draws.placing_s(9), draws.sending_s("a")) == (0.75, 0.125)
    assert (first, last) == (0.875, 2.875)  # an answer also took `message_s` to the router
    computing.clear()
    last = draws.answering_s("a", is_last=True)
    assert (draws.placing_s(9), draws.sending_s("a"), last) == (0.5, 0.25, 1.875)


def test_requests_take_the_measured_delays() -> None:
    measured = MeasuredDelays(((0.5,),), ((0.25,),), ((1.0,),), ((2.0,),))
    delays = Delays(message_s=0.125, measured=measured)
    fleet = small_fleet(0, 1, delays=delays)
    long, short = served(fleet, single(0.0, 9, 3), single(9.0, 9, 1)).requests
    assert long.ttft_s > 0.5 + 0.25 + 1.0
    assert long.end > long.first_token
    assert short.end >= short.first_token


def test_step_models_learn_from_every_step_if_they_should() -> None:
    learnt = []
    for every in (True, False):
        fleet = small_fleet(0, 1)
        worker = fleet._outcome.workers[0]
        worker.spec = replace(worker.spec, learns_every_step=every)
        served(fleet, single(0.0, 9, 30))
        learnt.append(worker.scheduler.model.totals.seconds)
    usage = worker.usage
    assert learnt[0] == pytest.approx(usage.prefill_s + usage.decode_s)
    assert learnt[1] < learnt[0] / 2


def test_step_models_do_not_learn_the_time_between_two_steps() -> None:
    fleet = small_fleet(0, 1)
    worker = fleet._outcome.workers[0]
    worker.spec = replace(worker.spec, learns_every_step=True, turn_s=0.004)
    served(fleet, single(0.0, 9, 30))
    usage, totals = worker.usage, worker.scheduler.model.totals
    whole_s = usage.prefill_s + usage.decode_s
    assert totals.seconds == pytest.approx(whole_s - usage.num_steps * 0.004)


def test_step_models_that_learn_from_every_step_know_the_warm_up() -> None:
    """A prompt of a whole chunk, 32 tokens, then the decodes of three of its four tokens."""
    spec = worker_spec(Role.DECODE)
    assert spec.step_model().totals.seconds == 0.0
    warm = replace(spec, learns_every_step=True).step_model()
    steps_s = (0.01 + 32 * 0.001 + 32e-6) + sum(0.011 + each * 1e-6 for each in (33, 34, 35))
    assert warm.totals.seconds == pytest.approx(steps_s)
    short = replace(spec, learns_every_step=True, max_context=10).step_model()
    assert short.totals.seconds == pytest.approx(0.01 + 9 * 0.001 + 9e-6)


def test_load_is_not_reported_too_often_and_the_last_report_is_the_newest() -> None:
    fleet = small_fleet(0, 1, delays=Delays(report_s=0.5))
    taken: list[tuple[float, WorkerStats]] = []
    router = fleet._routers[0]
    take = router.take_stats

    def noting(stats: WorkerStats) -> None:
        taken.append((fleet._queue.now, stats))
        take(stats)

    router.take_stats = noting  # type: ignore[method-assign]
    outcome = served(fleet, *(single(number / 10, 20, 4) for number in range(20)))
    times = [at for at, _ in taken]
    assert all(later - at >= 0.5 - 1e-9 for at, later in pairwise(times))
    assert len(times) >= 4
    assert (taken[-1][1].num_running, taken[-1][1].num_waiting) == (0, 0)
    assert sum(worker.usage.decode_tokens for worker in outcome.workers) == 60


def test_placement_trusts_step_models_that_were_accurate() -> None:
    views: list[FleetView] = []

    def noting(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
        views.append(view)
        return decide(view, query, now, rng)

    fleet = small_fleet(0, 1, policy=noting)
    served(fleet, *(single(5.0 * number, 200, 40) for number in range(20)))
    worker = views[-1].worker("decode-0")
    assert worker is not None
    assert worker.speed is not None
    assert worker.speed.step_trust > 0.5
    assert worker.speed.token_trust > 0.5


def test_the_step_model_of_an_idle_worker_grows_old() -> None:
    """Its reports say that it has computed nothing since."""
    views: list[FleetView] = []

    def noting(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
        views.append(view)
        return decide(view, query, now, rng)

    fleet = small_fleet(0, 2, policy=noting)
    served(fleet, *(single(at, 200, 40) for at in (0.0, 0.0, 0.0, 0.0, 40.0)))
    freshest = [view.speed.freshness for view in map(views[-1].worker, ("decode-0", "decode-1"))]
    assert max(freshest) > 0.9, "it has just served the last request"
    assert 0.05 < min(freshest) < 0.1, "four half-lives of ten seconds"


def test_a_worker_that_stays_idle_stops_reporting() -> None:
    """A fleet of 1,000 workers would report as many times in each second of a quiet night."""
    fleet = small_fleet(0, 2)
    served(fleet, single(0.0, 200, 4), single(10_000.0, 200, 4))
    assert 100 < fleet.num_events < 300
