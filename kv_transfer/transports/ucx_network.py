"""The network interfaces on which UCX, under NIXL, may listen.

UCX over TCP does not authenticate who connects, and a connection may write to any address of the
process. So UCX gets only the interfaces that it needs: loopback, if all workers run on one host,
otherwise those that the operator names, and TCP on them only if the operator allows it. RDMA needs
no permission, because remote keys guard the memory. Pure: returns the variables for UCX.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from protocol.errors import ConfigError

NET_DEVICES, TLS, PORTS = "UCX_NET_DEVICES", "UCX_TLS", "UCX_TCP_PORT_RANGE"
UNSIGNALLED = {"UCX_DEBUG_SIGNO": "0"}
"""UCX would take SIGHUP for itself, and write debug logs from then on."""


def ucx_network(
    outer_host: str | None,
    interfaces: Sequence[str],
    allows_tcp: bool,
    environment: Mapping[str, str],
    ports: str | None = None,
    system: Path = Path("/sys/class"),
) -> dict[str, str]:
    """The variables to set before NIXL starts. Variables that the operator has set in `environment`
    stay; an empty one counts as not set.

    `outer_host` is the address that the worker listens on, None for a loopback address;
    `interfaces` are names of network interfaces or RDMA ports (`mlx5_0:1`); `ports` is the range
    for TCP, "LO-HI", None for any. Raises ConfigError, naming the missing setting.
    """
    chosen = {} if ports is None else {PORTS: ports}
    if outer_host is None and not interfaces:
        return _unless_set(chosen | {NET_DEVICES: "lo"}, environment)
    if not interfaces:
        raise ConfigError(
            f"a worker that listens on {outer_host} exchanges KV blocks with other hosts: name the "
            "interface for them with --kv-interface (eth0, or mlx5_0:1 for RDMA), or listen on "
            "127.0.0.1"
        )
    for name in interfaces:
        device = name.partition(":")[0]
        if not any((system / kind / device).exists() for kind in ("net", "infiniband")):
            raise ConfigError(f"--kv-interface {name}: this machine has no such interface")
    is_rdma = all((system / "infiniband" / each.partition(":")[0]).exists() for each in interfaces)
    is_local = all(each == "lo" for each in interfaces)
    chosen[NET_DEVICES] = ",".join(interfaces)
    if is_rdma and not allows_tcp:
        chosen[TLS] = "^tcp"
    elif not allows_tcp and not is_local:
        raise ConfigError(
            f"KV blocks would move over TCP on {', '.join(interfaces)}: anyone who reaches UCX's "
            "port there can write into this process. If only trusted machines do, give "
            "--allow-kv-over-tcp; else use RDMA"
        )
    return _unless_set(chosen, environment)


def _unless_set(chosen: dict[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in chosen.items() if not environment.get(name)}


def without_empty(environment: MutableMapping[str, str]) -> None:
    """Remove UCX's variables that are empty: UCX would find no device or way by such a one, where
    the operator has just left it out."""
    for name in [name for name, text in environment.items() if name[:4] == "UCX_" and not text]:
        del environment[name]


def said_to_ucx(environment: Mapping[str, str]) -> str:
    """The variables by which UCX was told what to use, for an error message; "" if none is set."""
    said = [
        f"{name}={environment[name]}" for name in (TLS, NET_DEVICES, PORTS) if name in environment
    ]
    return f" (with {', '.join(said)})" if said else ""
