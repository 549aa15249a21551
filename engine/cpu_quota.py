"""How many threads can compute at the same time within the CPU quotas of our control groups.

`docker run --cpus 2` and a pod's CPU limit leave all of the host's cores visible, and let the group
run for a part of each period only. With more threads than that, all of them stand still at the end
of each period, and threads that wait for one another lose much more than the quota takes:
https://docs.kernel.org/scheduler/sched-bwc.html.
"""

from __future__ import annotations

from pathlib import Path

from engine.control_groups import ControlGroup, control_groups


def threads_within_quota(num_cores: int, root: Path = Path("/")) -> int:
    """The most threads on `num_cores` cores that no quota stops, at least 1.

    `root` is the folder in which `proc` and `sys` lie.
    """
    whole = (_whole_cores(each) for each in control_groups("cpu", root))
    return max(1, min([num_cores, *(each for each in whole if each is not None)]))


def _whole_cores(group: ControlGroup) -> int | None:
    """Cores that a group's quota keeps busy all the time; None without a quota."""
    if group.is_v2:
        quota, _, period = group.read("cpu.max").partition(" ")
    else:
        quota, period = group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")
    if not (quota.isdigit() and period.isdigit() and int(period)):  # "max", -1, or no such file
        return None
    return int(quota) // int(period)
