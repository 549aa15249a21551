"""Runs one case: starts its scene, plants the fault, and reads the console until all is said."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from gateway.admission.api_keys import hash_key, key_line
from tests.diagnosis.cases import Case
from tests.diagnosis.judge import PATIENCE, Expected, Moment, Outcome, judge
from tests.diagnosis.load import sent
from tests.diagnosis.scene import Beside, Scene, running
from tests.integration.fleets import wait_for

LOOK_S = 0.5
ALERT_S = 35.0
_PRESSURE = Path("/proc/pressure/cpu")


def run(case: Case) -> Outcome:
    """Run one case and judge it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-diagnosis-")))
        settings = {**case.settings, **_key_file(folder, case)}
        scene = stack.enter_context(running(folder, settings, case.environment))
        for each in case.beside:
            scene.start(each)
        wait_for("the processes beside", lambda: _are_there(scene, case.beside), 120.0)
        stack.enter_context(sent(scene.url, *case.loads))
        time.sleep(case.warm_up_s)
        begun_us, begun, begun_cpu_s = _pressed_us(), time.monotonic(), scene.cpu_s()
        with case.plant(scene):
            moments = _watch(scene, case.expected)
            cpu_s = scene.cpu_s() - begun_cpu_s
        outcome = judge(case.name, case.expected, moments)
        seconds = time.monotonic() - begun
        outcome.pressed = (_pressed_us() - begun_us) / 1e6 / seconds
        outcome.cpu_s, outcome.took_s = round(cpu_s, 1), round(seconds, 1)
        return outcome


def _key_file(folder: Path, case: Case) -> dict[str, str]:
    """The setting that names a file with the case's keys; none without keys."""
    if not case.keys:
        return {}
    path = folder / "keys"
    path.write_text("".join(f"{key_line(hash_key(key), terms)}\n" for key, terms in case.keys))
    return {"api_key_file": str(path)}


def _watch(scene: Scene, expected: Expected) -> list[Moment]:
    """What the console says, from now until everything expected was said, or time is over."""
    begun = before = time.monotonic()
    at_s = 0.0
    moments: list[Moment] = []
    while True:
        now, reading = time.monotonic(), scene.read()
        at_s, before = at_s + (now - before) * (1 - reading.starved_share), now
        moments.append(
            Moment(at_s, reading.headline, reading.findings, reading.alerts, reading.healthy,
                   now - begun)
        )  # fmt: skip
        if now - begun >= _limit_s(expected) or _is_over(expected, moments):
            return moments
        time.sleep(LOOK_S)


def _limit_s(expected: Expected) -> float:
    """How long a case may take. A starved machine delays everything, also alerts."""
    if expected.rule is None:
        return expected.within_s
    return PATIENCE * max(expected.within_s, ALERT_S if expected.alert else 0.0)


def _is_over(expected: Expected, moments: list[Moment]) -> bool:
    """Whether everything expected has been seen. A few more readings follow, which can only show
    something wrong."""
    if expected.rule is None:
        return False
    seen = judge("", expected, moments[:-6])
    is_said = seen.headline_s is not None and seen.finding_s is not None
    return is_said and (expected.alert is None or seen.alert_s is not None)


def _are_there(scene: Scene, beside: tuple[Beside, ...]) -> bool:
    routers = sum(each.kind == "router" for each in beside)
    return len(scene.get("/fleet")["routers"]) >= routers


def _pressed_us() -> int:
    """The time that processes of this machine waited for a core."""
    try:
        text = _PRESSURE.read_text()
    except OSError:
        return 0
    return int(text.partition("total=")[2].split()[0])
