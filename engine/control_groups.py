"""The control groups that this process is in, version 1 or 2, and the files with their limits.

A container's limits are those of its control group, or of a group above it; the host's figures do
not show them: https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/admin-guide/cgroup-v1/.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class ControlGroup:
    """A group's folder. Versions 1 and 2 have other files for the same limit."""

    folder: Path
    is_v2: bool

    def read(self, name: str) -> str:
        """The text of one of its files; "" if it cannot be read."""
        return _read(self.folder / name)


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """This process's groups for a controller of version 1, such as `memory`, and all groups above;
    none on systems without control groups. `root` is the folder in which `proc` and `sys` lie."""
    paths = _paths_of_groups(root)
    for mount, mounted, is_v2 in _mounts(controller, root):
        path = paths.get("" if is_v2 else controller)
        if path is None:
            continue
        # Without a namespace of its own, a container sees a part of the tree, mounted as a whole.
        inside = path.relative_to(mounted) if path.is_relative_to(mounted) else PurePosixPath()
        group = PurePosixPath(*(part for part in inside.parts if part not in ("/", "..")))
        for each in (group, *group.parents):
            yield ControlGroup(root / mount.relative_to("/") / each, is_v2)


def _paths_of_groups(root: Path) -> dict[str, PurePosixPath]:
    """The process's group in each hierarchy, by controller; version 2 has no controllers here."""
    paths = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = PurePosixPath(path)
    return paths


def _mounts(controller: str, root: Path) -> Iterator[tuple[PurePosixPath, PurePosixPath, bool]]:
    """Where groups are mounted, which group is the root there, and whether it is version 2."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mounted, mount = map(PurePosixPath, before.split(" ")[3:5])
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            yield mount, mounted, True
        elif kind == "cgroup" and controller in options.split(" ")[-1].split(","):
            yield mount, mounted, False


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
