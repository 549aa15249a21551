"""Tests that run in a forked process of their own, as heads of forked hands.

A hand can be forked only by a process with one thread, which a pytest process is not.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.forked import fork_context
from tests.forked_hands import ForkedHands
from worker.ranks import processes

WAIT_S, MOST_S = 10.0, 150.0
"""How long a test's process may take to end, and how long the test itself may take."""


def with_forked_hands(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test in a process that has forked so many hands. Its arguments are pickled, so it has
    parameters but no fixtures."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**parameters: Any) -> None:
            ours, theirs = fork_context().Pipe(duplex=False)
            arguments = (theirs, number, test.__module__, test.__name__, parameters)
            process = fork_context().Process(target=_run, args=arguments)
            process.start()
            theirs.close()
            with ours:
                try:
                    failure = ours.recv()
                except EOFError:
                    failure = f"the test's process has ended early, or hung for {MOST_S:g} s"
            process.join(WAIT_S)
            if failure:
                pytest.fail(failure, pytrace=False)
            assert process.exitcode == 0

        return run

    return decorate


def _run(
    result: Connection, number: int, module: str, name: str, parameters: dict[str, Any]
) -> None:
    processes.start_hand = ForkedHands(number).start  # type: ignore[assignment]
    faulthandler.dump_traceback_later(MOST_S, exit=True)  # its thread comes after the forks
    test = getattr(importlib.import_module(module), name).__wrapped__
    try:
        test(**parameters)
    except BaseException:  # noqa: BLE001 - pytest's own failures are no Exceptions
        result.send(traceback.format_exc())
    else:
        result.send("")
    result.close()
