from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from console.telemetry.examination.worker_window import SLOT_US, WorkerWindow
from tests.unit.router.router_harness import Harness, stats_of, until


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("fixed_us", "late_us"),
    [
        ((100, 100, 900, 700, 800), 700),  # the fastest of the last three
        ((900, 100, 100, 100, 800), 100),
        ((900, 900), None),  # it reports for too short a time
    ],
)
async def test_late_steps_and_their_model_are_those_of_the_newest_slots(
    harness: Harness, fixed_us: tuple[int, ...], late_us: int | None
) -> None:
    (fake,) = await harness.join("d1")
    await fake.subscribed()
    window, worker = WorkerWindow(), harness.fleet.worker("d1")
    for slot, fixed in enumerate(fixed_us):
        steps = 10 * slot
        fake.publish(
            msgspec.structs.replace(
                stats_of(fake), step_fixed_us=float(fixed), counters={"steps": steps}
            )
        )
        await until(lambda steps=steps: worker.stats and worker.stats.counters["steps"] == steps)
        window.sample([worker], 1 + slot * SLOT_US)
    facts = window.facts(worker, (0, 0), 0, 0.0)
    assert facts.late_steps == 10 * (min(3, len(fixed_us)) - 1)
    assert (facts.late_model and facts.late_model.fixed_us) == late_us
