"""How many threads fit into the CPU quotas of a container, of either version."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cpu_quota import threads_within_quota
from tests.unit.engine.fake_groups import FakeGroups


class FakeQuotas(FakeGroups):
    """CPU quotas of a process in a control group."""

    controller = "cpu"

    def group(self, path: str, cores: float | None) -> None:
        """A group with a quota of so many cores; None: without a quota."""
        quota = None if cores is None else round(cores * 100_000)
        if self.is_v2:
            text = "max" if quota is None else str(quota)
            self.write(path, {"cpu.max": f"{text} 100000"})
        else:
            values = {"cpu.cfs_quota_us": -1 if quota is None else quota}
            self.write(path, values | {"cpu.cfs_period_us": 100_000})


@pytest.fixture(params=[False, True], ids=["v1", "v2"])
def quotas(request: pytest.FixtureRequest, tmp_path: Path) -> FakeQuotas:
    return FakeQuotas(tmp_path, "/pod/container", "/", request.param)


@pytest.mark.parametrize(
    ("cores", "threads"), [(None, 16), (2, 2), (2.5, 2), (0.5, 1), (15.99, 15), (40, 16)]
)
def test_whole_cores_of_the_quota_count(
    quotas: FakeQuotas, cores: float | None, threads: int
) -> None:
    quotas.group("pod/container", cores)
    assert threads_within_quota(16, quotas.root) == threads


def test_the_tightest_group_above_counts(quotas: FakeQuotas) -> None:
    quotas.group("pod/container", None)
    quotas.group("pod", 3)
    quotas.group("", 8)
    quotas.group("other", 1)
    assert threads_within_quota(16, quotas.root) == 3


def test_without_control_groups_all_cores_count(tmp_path: Path) -> None:
    assert threads_within_quota(16, tmp_path) == 16
