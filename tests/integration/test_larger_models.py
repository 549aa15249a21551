"""A hybrid and a mixture of more than ten million weights, trained here for some minutes, served
apart: transformers' tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.fleets import assert_as_expected, complete_all, counters, running_fleet
from tests.integration.reference import NUM_TOKENS, clear_references
from tests.paths import DEMO_MODEL, ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
SCALES = {"hybrid": 6, "mixture": 3}
"""How many times as wide as those in the repository."""
TRAINING = {
    "hybrid": ("--steps=100", "--learning-rate=2e-3"),
    "mixture": ("--steps=60",),
}
LEAST_WEIGHTS = 10_000_000
NUM_BLOCKS = 16_000
"""A state of the hybrid takes the memory of 169 blocks, and all prompts' are kept."""


@pytest.mark.parametrize("kind", SCALES)
def test_a_larger_model_served_apart_gives_the_tokens_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    out, scale = tmp_path / kind, f"--scale={SCALES[kind]}"
    script = ROOT / "scripts" / f"train_test_{kind}.py"
    command = [sys.executable, script, f"--out={out}", *TRAINING[kind], scale, "--threads=2"]
    subprocess.run(command, check=True, timeout=1200)
    assert (out / "model.safetensors").stat().st_size > 2 * LEAST_WEIGHTS
    prompts = clear_references(out, (1, 17, 100, 700))
    with running_fleet(
        model=str(out),
        served_model_name=(DEMO_MODEL.name,),  # as all requests of these tests say
        prefill=1,
        decode=1,
        local_prefill_threshold_tokens=0,
        chunk_max_tokens=64,
        dtype="float32",
        num_blocks=NUM_BLOCKS,
    ) as fleet:
        for _ in range(2):  # what is cached gives the same
            assert_as_expected(prompts, complete_all(fleet, prompts, NUM_TOKENS, 4))
        assert counters(fleet, "decode-1")["handoffs"] == 2 * len(prompts)
        assert counters(fleet, "prefill-1")["cached_tokens"] > 0
