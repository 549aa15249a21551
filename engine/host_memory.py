"""How much memory this process may still take, within the machine's memory and the limits of its
control groups.

A container's limit is that of its control group, version 1 or 2, or of a group above it; the host's
figures do not show it. A group's free memory is its limit minus its use. File pages that the group
has not used lately count as free, because the kernel reclaims them first:
https://docs.kernel.org/admin-guide/cgroup-v2.html#memory and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil


@dataclass(frozen=True)
class _Version:
    """The names of one version's files, and of the field of `memory.stat` for unused file pages."""

    limits: tuple[str, ...]
    usage: str
    unused_files: str


_VERSION_1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take without being killed; 0 if a limit is exceeded.

    `root` is the folder in which `proc` and `sys` lie.
    """
    machine = int(psutil.virtual_memory().available)
    return max(0, min([machine, *(_left(*group) for group in _groups(root))]))


def _left(folder: Path, version: _Version) -> int:
    """Bytes left in one group; a very large number if it has no limit or cannot be read."""
    unlimited = 1 << 63
    limits = [int(text) for name in version.limits if (text := _read(folder / name)).isdigit()]
    usage = _read(folder / version.usage)
    if not limits or not usage.isdigit():
        return unlimited
    fields = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines())
    return min(limits) - int(usage) + int(fields.get(version.unused_files, 0))


def _groups(root: Path) -> Iterator[tuple[Path, _Version]]:
    """The folders of this process's memory groups, with those of all groups above."""
    paths = _paths_of_groups(root)
    for mount, mounted, version in _mounts(root):
        path = paths.get("" if version is _VERSION_2 else "memory")
        if path is None:
            continue
        # Without a namespace of its own, a container sees a part of the tree, mounted as a whole.
        inside = path.relative_to(mounted) if path.is_relative_to(mounted) else PurePosixPath()
        group = PurePosixPath(*(part for part in inside.parts if part not in ("/", "..")))
        for each in (group, *group.parents):
            yield root / mount.relative_to("/") / each, version


def _paths_of_groups(root: Path) -> dict[str, PurePosixPath]:
    """The process's group in each hierarchy, by controller; version 2 has no controllers here."""
    paths = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = PurePosixPath(path)
    return paths


def _mounts(root: Path) -> Iterator[tuple[PurePosixPath, PurePosixPath, _Version]]:
    """Where memory groups are mounted, and which group is the root there."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mounted, mount = map(PurePosixPath, before.split(" ")[3:5])
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            yield mount, mounted, _VERSION_2
        elif kind == "cgroup" and "memory" in options.split(" ")[-1].split(","):
            yield mount, mounted, _VERSION_1


def _read(path: Path) -> str:
    """A file's text; "" if it cannot be read, as on systems without control groups."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
