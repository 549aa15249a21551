"""Checkpoints in published formats, served by prefill and decode apart: one engine's tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cli.main import main
from tests.effort import some
from tests.integration.fleets import complete, counters, running_fleet
from tests.integration.one_engine import tokens_of_one_engine
from tests.integration.reference import DEMO_MODEL
from tests.paths import ROOT
from tests.published_formats import FORMATS_IN_PANELS, publish

PROMPTS = [[(7 * i + n) % 1800 + 3 for i in range(n)] for n in (16, 130)]
NUM_TOKENS = 16


@pytest.mark.parametrize("name", some(FORMATS_IN_PANELS, 1))
def test_apart_and_together_give_the_same_tokens(tmp_path: Path, name: str) -> None:
    folder = tmp_path / DEMO_MODEL.name
    shutil.copytree(DEMO_MODEL, folder)
    publish(folder, FORMATS_IN_PANELS[name])
    serves_like_one_engine(folder)


def test_weights_that_were_rounded_for_a_text_are_served(tmp_path: Path) -> None:
    text, folder = ROOT / "README.md", tmp_path / DEMO_MODEL.name
    quantize = ["quantize", f"--model={DEMO_MODEL}", f"--text={text}", f"--output={folder}"]
    assert main([*quantize, "--tokens=1000"]) == 0
    serves_like_one_engine(folder)


def serves_like_one_engine(folder: Path) -> None:
    """Serve the model in `folder` by prefill and decode apart."""
    with running_fleet(model=str(folder)) as fleet:
        apart = [complete(fleet, prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
        assert counters(fleet, "decode-1")["handoffs"] > 0
    together = tokens_of_one_engine(folder, PROMPTS, NUM_TOKENS)
    assert [answer["choices"][0]["token_ids"] for answer in apart] == together
