"""Which ways UCX may take, from its setting and what the machine has."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kv_transfer.transports.ucx_paths import ucx_paths, usable_paths


@pytest.mark.parametrize(
    ("device", "setting", "expected"),
    [
        ("cpu", None, ("CMA", "TCP")),
        ("cuda:1", None, ("CUDA IPC", "TCP")),
        ("cuda:0", "all", ("CUDA IPC", "TCP")),
        ("cuda:0", "cuda_copy,tcp", ("TCP",)),
        ("cuda:0", "cuda, sm", ("CUDA IPC",)),
        ("cuda:0", "^cuda_ipc", ("TCP",)),
        ("cpu", "^sm,ib", ("TCP",)),
        ("cpu", "self", ()),
    ],
)
def test_paths_without_an_adapter(
    device: str, setting: str | None, expected: tuple[str, ...], tmp_path: Path
) -> None:
    environment = {} if setting is None else {"UCX_TLS": setting}
    assert ucx_paths(device, environment, tmp_path) == expected


def test_an_adapter_gives_rdma_where_it_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert ucx_paths("cuda:0", {}, tmp_path) == ("CUDA IPC", "RDMA", "TCP")
    assert ucx_paths("cpu", {"UCX_TLS": "rc,tcp"}, tmp_path) == ("RDMA", "TCP")
    assert ucx_paths("cpu", {"UCX_TLS": "^rc"}, tmp_path) == ("CMA", "TCP")


PATHS = ("CUDA IPC", "RDMA", "TCP")


def test_a_pool_that_may_not_be_exported_has_no_cuda_ipc(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = usable_paths(PATHS, "it lies in an expandable segment")
    assert found == ("RDMA", "TCP")
    [line] = caplog.messages
    assert "move by RDMA or TCP" in line
    assert line.endswith("it lies in an expandable segment")


@pytest.mark.parametrize(
    ("paths", "reason"), [(PATHS, ""), (("CMA", "TCP"), "on a card"), ((), "")]
)
def test_other_pools_keep_their_paths_without_a_word(
    paths: tuple[str, ...], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert usable_paths(paths, reason) == paths
    assert not caplog.messages
