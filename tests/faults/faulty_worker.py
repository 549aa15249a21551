"""A worker that a test can hold at an exact point: `python -m tests.faults.faulty_worker ROLE ...`.

Runs the real worker with its classes wrapped. The folder `FAULTS_DIR` arms points: a file
`WORKER_ID.POINT` with a number holds the loop when it passes the point for that time, until the
file is removed; `WORKER_ID.POINT.reached` says that it stands there. Only the thread that passes
is held (at `post` that of the transfers, else the loop's), so that messages already sent leave;
the lease lives on. Prompts that begin with POISON make a step raise, those that begin with DEADLY
end the process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from cli.commands import COMMANDS
from engine.engine import Engine, StepResult
from engine.runner import ModelRunner
from engine.scheduler import Batch
from kv_transfer.sender import HandoffSender
from kv_transfer.service import TransferService
from kv_transfer.transfer_loop import TransferLoop

POISON = [13, 14, 13, 14, 15]
DEADLY = [15, 14, 13, 14, 13]
FAULTS_DIR = "FAULTS_DIR"


class FaultPoints:
    """The armed points of one worker."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        self._folder = folder
        self._worker_id = worker_id
        self._passes: dict[str, int] = {}

    def reach(self, point: str) -> None:
        """Pass a point, or stand there until the test lets go."""
        armed = self._folder / f"{self._worker_id}.{point}"
        try:
            wanted = int(armed.read_text())
        except FileNotFoundError:
            self._passes.pop(point, None)
            return
        self._passes[point] = self._passes.get(point, 0) + 1
        if self._passes[point] != wanted:
            return
        reached = self._folder / f"{self._worker_id}.{point}.reached"
        reached.touch()
        while armed.exists():
            time.sleep(0.001)
        reached.unlink(missing_ok=True)


def install(points: FaultPoints) -> None:
    """Wrap what the points are named after."""
    _before(HandoffSender, "grant", lambda *_: points.reach("grant"))
    _before(TransferService, "write", lambda *_: points.reach("write"))
    _before(TransferLoop, "write", lambda *_: points.reach("post"))
    _before(ModelRunner, "run", _spoil)
    run = Engine.run

    @wraps(run)
    def run_and_reach(engine: Engine, batch: Batch) -> StepResult:
        result = run(engine, batch)
        if batch.chunks:
            points.reach("chunk")
        if batch.decodes:
            points.reach("decode")
        return result

    Engine.run = run_and_reach  # type: ignore[method-assign]


def _before(owner: type, name: str, action: Callable[..., None]) -> None:
    method = getattr(owner, name)

    @wraps(method)
    def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
        action(*arguments)
        return method(self, *arguments, **named)

    setattr(owner, name, wrapped)


def _spoil(batch: Batch) -> None:
    for sequence in batch.sequences:
        if sequence.tokens[: len(DEADLY)] == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        if sequence.tokens[: len(POISON)] == POISON:
            raise RuntimeError("a poisonous request")


def main(arguments: list[str]) -> int:
    """The role's own main, on wrapped classes."""
    role, flags = arguments[0], arguments[1:]
    worker_id = next(flag.partition("=")[2] for flag in flags if flag.startswith("--worker-id="))
    install(FaultPoints(Path(os.environ[FAULTS_DIR]), worker_id))
    return COMMANDS[role].load_main()(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
