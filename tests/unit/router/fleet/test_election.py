"""Which model a fleet serves, and which workers are therefore refused."""

from __future__ import annotations

import logging

import pytest

from protocol.messages import PROTOCOL_VERSION, Role
from router.fleet.conditions import USABLE, Cause, State
from router.fleet.election import WantedModel
from tests.unit.router.fleet.members import ids
from tests.unit.router.router_harness import Harness, until


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_fingerprint": "o", "model": "big"}, "it serves 'big', and this fleet 'model'"),
        ({"model_fingerprint": "o"}, "it serves another version of 'model' than this fleet"),
        (
            {"layout_fingerprint": "tp2"},
            "KV layout fingerprint differs: ours is layout, the peer's is tp2",
        ),
        (
            {"protocol_version": 99},
            f"protocol version differs: ours is {PROTOCOL_VERSION}, the peer's is 99",
        ),
    ],
)
async def test_who_differs_is_refused_once_and_named_by_its_model(
    harness: Harness, caplog: pytest.LogCaptureFixture, fields, told
) -> None:
    await harness.join("d1")
    harness.workers["d2"] = harness.make("d2", **fields)
    with caplog.at_level(logging.ERROR):
        harness.refresh()
        harness.refresh()
    (record,) = caplog.records
    assert record.getMessage() == f"worker d2 is not used: {told}"
    assert ids(harness, Role.DECODE) == ["d1"]


def members(harness: Harness, **models: str) -> None:
    """Workers that register with a model, and a checkpoint of the same name."""
    for name, model in models.items():
        worker = harness.make(
            name,
            model=model,
            model_fingerprint=f"{model} weights",
            texts_fingerprint=f"{model} texts",
        )
        harness.workers[name] = worker


async def test_a_router_serves_what_its_own_checkpoint_is_of(harness: Harness) -> None:
    """A stray worker of another model, which registered first, does not take over."""
    harness.fleet.want(WantedModel("real", "real texts"))
    members(harness, d0="stray")
    harness.refresh()
    assert harness.fleet.identity is None
    told = "it serves 'stray', and its configuration or tokenizer is not that of this router's"
    assert harness.fleet.not_ready_reason() == (
        f"no decode worker is ready: d0 is refused: {told} 'real'"
    )
    members(harness, d1="real", d2="stray")
    harness.refresh()
    assert harness.fleet.identity.model == "real"
    await until(lambda: harness.is_usable("d1"))
    assert [each.worker_id for each in harness.fleet.workers()] == ["d1"]
    conditions = harness.fleet.conditions()
    assert str(conditions["d0"]) == str(conditions["d2"]) == f"refused: {told} 'real'"
    assert conditions["d0"].cause is Cause.MODEL


async def test_of_workers_that_do_not_tell_the_named_model_is_served(harness: Harness) -> None:
    harness.fleet.want(WantedModel("named", "texts", is_named=True))
    for name, model in (("d0", "other"), ("d1", "other"), ("d2", "named")):
        harness.workers[name] = harness.make(name, model=model, model_fingerprint=model)
    harness.refresh()
    assert harness.fleet.identity.model == "named"


async def test_workers_of_the_own_checkpoint_count_more_than_a_name(harness: Harness) -> None:
    harness.fleet.want(WantedModel("named", "texts", is_named=True))
    for name in ("d0", "d1"):
        harness.workers[name] = harness.make(name, model="named", model_fingerprint="silent")
    harness.workers["d2"] = harness.make(
        "d2", model="renamed", model_fingerprint="ours", texts_fingerprint="texts"
    )
    harness.refresh()
    assert harness.fleet.identity.model == "renamed"


async def test_of_workers_that_do_not_tell_most_decide(harness: Harness) -> None:
    harness.fleet.want(WantedModel("mine", "texts"))
    for name, model in (("d0", "stray"), ("d1", "real"), ("d2", "real")):
        harness.workers[name] = harness.make(name, model=model, model_fingerprint=model)
    harness.refresh()
    assert harness.fleet.identity.model == "real"
    await until(lambda: harness.is_usable("d1"))


async def test_another_model_takes_over_when_nobody_serves_the_first(harness: Harness) -> None:
    await harness.join("d1")
    await harness.kill("d1")
    await harness.join("d2", model_fingerprint="other")
    assert harness.fleet.identity.model_fingerprint == "other"


async def test_a_refused_worker_is_used_once_the_others_are_gone(harness: Harness) -> None:
    await harness.join("d1")
    harness.workers["d2"] = harness.make("d2", model_fingerprint="other")
    harness.refresh()
    assert harness.fleet.condition(harness.workers["d2"].info).state is State.REFUSED
    await harness.kill("d1")
    harness.refresh()
    await until(lambda: harness.is_usable("d2"))
    assert harness.fleet.condition(harness.workers["d2"].info) == USABLE
