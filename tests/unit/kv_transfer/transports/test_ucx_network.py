"""UCX listens where it must and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_transfer.transports.ucx_network import said_to_ucx, ucx_network, without_empty
from protocol.errors import ConfigError


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A machine with two network interfaces and an RDMA adapter."""
    for name in ("net/lo", "net/eth0", "infiniband/mlx5_0"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def test_on_one_host_it_listens_on_loopback(system: Path) -> None:
    assert ucx_network(None, (), False, {}, None, system) == {"UCX_NET_DEVICES": "lo"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "worker.example"])
def test_between_hosts_the_interface_must_be_named(system: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="--kv-interface"):
        ucx_network(host, (), True, {}, None, system)


def test_tcp_between_hosts_must_be_allowed(system: Path) -> None:
    with pytest.raises(ConfigError, match=r"TCP on eth0.*--allow-kv-over-tcp"):
        ucx_network("0.0.0.0", ("eth0",), False, {}, None, system)
    with pytest.raises(ConfigError, match="TCP on eth0, mlx5_0:1"):
        ucx_network("0.0.0.0", ("eth0", "mlx5_0:1"), False, {}, None, system)
    allowed = ucx_network("0.0.0.0", ("eth0",), True, {}, None, system)
    assert allowed == {"UCX_NET_DEVICES": "eth0"}


def test_rdma_needs_no_permission_and_leaves_tcp_out(system: Path) -> None:
    chosen = ucx_network("0.0.0.0", ("mlx5_0:1",), False, {}, None, system)
    assert chosen == {"UCX_NET_DEVICES": "mlx5_0:1", "UCX_TLS": "^tcp"}


def test_an_interface_that_is_not_there_is_named(system: Path) -> None:
    with pytest.raises(ConfigError, match="eth7: this machine has no such interface"):
        ucx_network("0.0.0.0", ("eth7",), True, {}, None, system)


def test_what_the_operator_has_set_for_ucx_stays(system: Path) -> None:
    own = {"UCX_NET_DEVICES": "eth0", "UCX_TLS": "tcp"}
    assert ucx_network(None, (), False, own, None, system) == {}
    assert ucx_network("0.0.0.0", ("mlx5_0:1",), False, own, None, system) == {}


def test_an_empty_variable_opens_no_other_interface(system: Path) -> None:
    empty = {"UCX_NET_DEVICES": "", "UCX_TLS": "", "UCX_TCP_PORT_RANGE": "", "OTHER": ""}
    assert ucx_network(None, (), False, empty, None, system) == {"UCX_NET_DEVICES": "lo"}
    chosen = ucx_network("0.0.0.0", ("mlx5_0:1",), False, empty, "4100-4199", system)
    assert set(chosen) == {"UCX_NET_DEVICES", "UCX_TLS", "UCX_TCP_PORT_RANGE"}
    without_empty(empty)
    assert empty == {"OTHER": ""}, "UCX itself reads an empty variable as nothing at all"


def test_an_error_names_what_ucx_was_told() -> None:
    assert said_to_ucx({"UCX_TLS": "rc", "UCX_LOG_LEVEL": "info"}) == " (with UCX_TLS=rc)"
    assert said_to_ucx({"HOME": "/"}) == ""


def test_named_ports_are_for_tcp_on_any_interface(system: Path) -> None:
    named = {"UCX_TCP_PORT_RANGE": "41000-41009"}
    local = ucx_network(None, (), False, {}, "41000-41009", system)
    assert local == named | {"UCX_NET_DEVICES": "lo"}
    outer = ucx_network("0.0.0.0", ("eth0",), True, {}, "41000-41009", system)
    assert outer == named | {"UCX_NET_DEVICES": "eth0"}
    own = {"UCX_TCP_PORT_RANGE": "1-2"}
    assert ucx_network(None, (), False, own, "41000-41009", system) == {"UCX_NET_DEVICES": "lo"}
