"""Records what routers see of real fleets with one planted fault each, for `test_recorded_fleets`.

`python -m tests.unit.console.doctor.record_fleets [NAME ...]` runs cases of `tests.diagnosis`, each
for half a minute, and writes the observation of the router's doctor to `recorded/NAME.json.gz`. Use
a machine with nothing else to do.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from console.doctor.observation import MIN_REQUESTS
from tests.diagnosis.cases import FAULTS, HEALTHY
from tests.diagnosis.load import sent
from tests.diagnosis.scene import Scene, running

FOLDER = Path(__file__).parent / "recorded"
SECONDS = 32.0
DIGITS = 3
CASES = {
    "healthy": "steady",
    "prefill_short": "prefill_short",
    "decode_places": "decode_places",
    "memory_full": "memory_full",
    "slow_worker": "slow_worker",
    "faults": "crash_loop",
    "targets": "targets_out_of_reach",
    "stalls": "stalls",
    "cache_thrash": "cache_thrash",
}
"""The case that each recording is of."""
RECIPES = {
    name: next(each for each in (*FAULTS, *HEALTHY) if each.name == case)
    for name, case in CASES.items()
}


def record(name: str) -> None:
    """Run one case and write its observation."""
    case = RECIPES[name]
    with (
        tempfile.TemporaryDirectory(prefix="baton-recording-") as folder,
        running(Path(folder), case.settings, case.environment) as scene,
    ):
        with sent(scene.url, *case.loads), case.plant(scene):
            time.sleep(SECONDS)
        seen, found = _observation(scene), scene.get("/doctor")
    rules = [each["rule"] for each in found["findings"]]
    print(f"{name}: {len(seen['requests'])} requests, found {rules}, expected {case.expected.rule}")
    content = json.dumps(_rounded(seen)).encode()
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(content, mtime=0))


def _observation(scene: Scene) -> dict[str, Any]:
    """The first observation after the load that has enough requests."""
    for _ in range(40):
        time.sleep(0.5)
        try:
            seen = scene.get("/doctor/observation")
        except httpx.HTTPStatusError:  # not examined yet
            continue
        if len(seen["requests"]) >= MIN_REQUESTS:
            return dict(seen)
    raise SystemExit(f"fewer than {MIN_REQUESTS} requests ended: the machine is too slow")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    """Record the named fleets, or all."""
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or RECIPES:
        record(name)


if __name__ == "__main__":
    main()
