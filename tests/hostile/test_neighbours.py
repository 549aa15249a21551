"""Every flood of one key at small sizes, and at night at full size: no neighbour is refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.admission.api_keys import KeyRing, hash_key
from gateway.admission.gate import Gate
from gateway.api.context import ApiLimits
from gateway.http.access import AccessRules
from gateway.text.tokenizer import Tokenizer
from tests.effort import some
from tests.hostile.neighbours import FLOOD, FLOODS, NEIGHBOUR, run_flood
from tests.hostile.sizes import SMALL
from tests.paths import ROOT
from tests.unit.gateway.api_harness import MODEL, LiveApi, write_checkpoint

SIZES = replace(SMALL, model=MODEL, context=20_000)
LIMIT = 20 * SIZES.body_bytes


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApi]:
    """A server whose budget and places one key's flood would exhaust."""
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    tokenizer = Tokenizer(folder)
    ring = KeyRing([f"{hash_key(FLOOD)} name=flood", f"{hash_key(NEIGHBOUR)} name=neighbour"])
    gate = Gate(20, time.monotonic, lambda: len(ring))
    limits = ApiLimits(max_body_bytes=SIZES.body_bytes, max_inflight_bytes=LIMIT)
    rules = AccessRules(api=ring, salt=b"the cluster's secret")
    with LiveApi(folder, tokenizer, limits, SIZES.context, rules=rules, gate=gate) as api:
        api.reset()
        yield api
    tokenizer.close()


@pytest.mark.parametrize("name", some(FLOODS, 5))
def test_a_flood_of_one_key_refuses_no_neighbour(live: LiveApi, name: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        flood, seen = asyncio.run(run_flood(FLOODS[name], live.port, SIZES, 0.6, pool))
    assert seen.num_answers > 0
    assert not seen.refused
    assert not flood.faults
    assert set(flood.statuses) <= {200, 400, 429, 503}
    live.http.headers["authorization"] = f"Bearer {NEIGHBOUR}"
    live.generator.wait_idle()
    live.settle(lambda: live.metric("baton_http_bytes_in_flight") == 0)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_no_flood_of_one_key_does_harm() -> None:
    """Needs a machine with nothing else to do: the bounds are times."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.neighbours"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
