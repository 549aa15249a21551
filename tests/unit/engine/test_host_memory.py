"""Free memory under limits of control groups: both versions, every group above, real groups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from engine.device import available_bytes
from engine.host_memory import available_memory, oom_kills
from tests.unit.engine.fake_groups import FakeGroups

MIB = 1 << 20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")
UNLIMITED_V1 = 9223372036854771712


class FakeSystem(FakeGroups):
    """Memory of a process in a control group."""

    controller = "memory"

    def group(self, path: str, limit: int | str, usage: int, unused_files: int = 0) -> None:
        limit_name, usage_name, field = V2 if self.is_v2 else V1
        statistics = f"anon 5\n{field} {unused_files}\nzswap 0"
        self.write(path, {limit_name: limit, usage_name: usage, "memory.stat": statistics})

    def available(self) -> int:
        return available_memory(self.root)


@pytest.fixture(params=[False, True], ids=["v1", "v2"])
def is_v2(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_a_container_with_a_namespace_of_its_own(tmp_path: Path, is_v2: bool) -> None:
    system = FakeSystem(tmp_path, "/", "/", is_v2)
    system.group("", 100 * MIB, 70 * MIB, 20 * MIB)
    assert system.available() == 50 * MIB


def test_a_container_that_sees_the_hosts_path_and_only_its_own_part(tmp_path, is_v2) -> None:
    system = FakeSystem(tmp_path, "/kubepods/pod1/c1", "/kubepods/pod1/c1", is_v2)
    system.group("", 100 * MIB, 90 * MIB)
    assert system.available() == 10 * MIB


@pytest.mark.parametrize("tightest", ["", "pods", "pods/one", "pods/one/c"])
def test_every_group_above_counts(tmp_path: Path, is_v2: bool, tightest: str) -> None:
    system = FakeSystem(tmp_path, "/pods/one/c", "/", is_v2)
    for each in ("", "pods", "pods/one", "pods/one/c"):
        system.group(each, "max" if is_v2 else UNLIMITED_V1, 20 * MIB)
    system.group(tightest, 60 * MIB, 20 * MIB)
    system.group("pods/two", 1 * MIB, 1 * MIB)
    assert system.available() == 40 * MIB


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path, is_v2: bool) -> None:
    system = FakeSystem(tmp_path, "/", "/", is_v2)
    system.group("", 10 * MIB, 11 * MIB)
    assert system.available() == 0


def test_a_limit_above_which_version_2_throttles_counts(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "/", "/", is_v2=True)
    system.group("", 100 * MIB, 10 * MIB)
    (system.mount / "memory.high").write_text(f"{30 * MIB}\n")
    assert system.available() == 20 * MIB


def test_a_group_outside_of_what_is_mounted(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, "/../..", "/", is_v2=True)
    system.group("", 100 * MIB, 10 * MIB)
    assert system.available() == 90 * MIB


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    assert 0 < available_memory(tmp_path) <= psutil.virtual_memory().total
    assert 0 < available_bytes(torch.device("cpu")) <= psutil.virtual_memory().total


def test_kills_for_lack_of_memory_are_those_in_the_own_group(tmp_path: Path, is_v2: bool) -> None:
    system = FakeSystem(tmp_path, "/pods/one", "/", is_v2)
    name = "memory.events" if is_v2 else "memory.oom_control"
    assert oom_kills(tmp_path) == 0
    system.write("pods", {name: "oom_kill 7"})
    system.write("pods/one", {name: "under_oom 0\noom_kill 2"})
    assert oom_kills(tmp_path) == 2


def test_without_control_groups_no_kills_are_known(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == 0
