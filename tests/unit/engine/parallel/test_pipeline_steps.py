"""Steps of a pipeline whose last stage is on a card: launched is not computed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from engine.model_runner import Chosen
from engine.parallel.pipeline_runner import PipelineRunner


class Open:
    def __init__(self) -> None:
        self.is_passed = False

    def is_done(self) -> bool:
        return self.is_passed

    def wait(self) -> None:
        self.is_passed = True


def test_what_a_step_writes_is_stored_once_the_card_has_passed_its_fence() -> None:
    fences: list[Open] = []

    def run(planned: Any) -> Chosen:
        fences.append(Open())
        return Chosen({}, torch.zeros(0), fences[-1], fences[-1], mock.Mock())

    own, model = mock.Mock(), mock.Mock()
    own.run_planned = run
    runner = PipelineRunner(own, model)
    first, second = (runner.launch_ahead(mock.Mock(), None) for _ in range(2))
    assert not first.stored.is_done()
    runner.run_next()
    assert not first.stored.is_done(), "its card still computes"
    first.stored.wait()
    assert first.stored.is_done()
    second.stored.wait()
    assert [fence.is_passed for fence in fences] == [True, True]
    assert second.stored.is_done()
