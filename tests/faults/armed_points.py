"""The folder that arms the points at which a test can hold workers of `tests.faults.faulty_worker`,
or spoil their writes."""

from __future__ import annotations

from pathlib import Path

from protocol.messages import Role
from tests.integration.fleets import wait_for


class ArmedPoints:
    """Workers find the folder by the environment variable FAULTS_DIR."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def arm(self, names: list[str], point: str, passes: int = 1) -> None:
        """The named workers are held when they pass the point for the `passes`th time."""
        for name in names:
            temporary = self._folder / f".{name}"
            temporary.write_text(str(passes))
            temporary.rename(self._folder / f"{name}.{point}")

    def spoil(self, role: Role, kind: str, passes: int = 1) -> None:
        """The `passes`th write of one worker of a role will `fail`, `hang` or be `corrupt`, or its
        lookup for a fetch meets a cache that it will `evict`."""
        temporary = self._folder / f".{role.value}"
        temporary.write_text(str(passes))
        temporary.rename(self._folder / f"{role.value}.{kind}")

    def spoilt(self, kind: str) -> str:
        """Wait until a write was spoilt, and return the worker that wrote."""
        (reached,) = wait_for(
            f"a write to {kind}", lambda: list(self._folder.glob(f"*.{kind}.reached"))
        )
        reached.unlink()
        return reached.name.removesuffix(f".{kind}.reached")

    def is_any_held(self, point: str) -> bool:
        """Whether a worker is held at a point."""
        return any(self._folder.glob(f"*.{point}.reached"))

    def held(self, point: str) -> str:
        """Wait until a worker is held at a point, and disarm the others. Returns the worker's
        name."""
        reached = wait_for(
            f"a worker to reach {point}", lambda: list(self._folder.glob(f"*.{point}.reached"))
        )
        name = reached[0].name.removesuffix(f".{point}.reached")
        for armed in self._folder.glob(f"*.{point}"):
            if armed.name != f"{name}.{point}":
                armed.unlink()
        return name

    def release(self, name: str, point: str) -> None:
        """Let a held worker, which is not stopped, continue; it may be armed again after that."""
        (self._folder / f"{name}.{point}").unlink()
        reached = self._folder / f"{name}.{point}.reached"
        wait_for(f"{name} to leave {point}", lambda: not reached.exists())
