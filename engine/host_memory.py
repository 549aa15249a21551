"""How much memory this process may still take, within the machine's memory and the limits of its
control groups.

A group's free memory is its limit minus its use. File pages that the group has not used lately
count as free, because the kernel reclaims them first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.control_groups import ControlGroup, control_groups


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
    return max(0, min([machine, *(_left(each) for each in control_groups("memory", root))]))


def oom_kills(root: Path = Path("/")) -> int:
    """The number of processes in this one's control group that the kernel has killed for lack of
    memory; 0 without control groups. `root` as above."""
    own = next(control_groups("memory", root), None)
    if own is None:
        return 0
    events = own.read("memory.events" if own.is_v2 else "memory.oom_control")
    return int(dict(line.split(" ", 1) for line in events.splitlines()).get("oom_kill", 0))


def _left(group: ControlGroup) -> int:
    """Bytes left in one group; a very large number if it has no limit or cannot be read."""
    unlimited = 1 << 63
    version = _VERSION_2 if group.is_v2 else _VERSION_1
    limits = [int(text) for name in version.limits if (text := group.read(name)).isdigit()]
    usage = group.read(version.usage)
    if not limits or not usage.isdigit():
        return unlimited
    fields = dict(line.split(" ", 1) for line in group.read("memory.stat").splitlines())
    return min(limits) - int(usage) + int(fields.get(version.unused_files, 0))
