"""Settings that both worker roles share; each role's own settings derive from these.

Holds only values that the operator sets. Derived values (block counts, thread counts) live in the
code that derives them.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from kv_transfer.transports.registry import AUTO, TRANSPORTS
from process.settings import setting
from process.settings.shared import NAME_PATTERN
from process.sockets.host_names import is_wildcard
from protocol.errors import ConfigError
from worker.engine_settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(EngineSettings):
    """Settings of a prefill or decode worker: those of its engine, and how it is reached, moves
    KV blocks and ends."""

    request_deadline_s: float = setting(
        600.0,
        help="longest that any request may take, whatever its router allows",
        unit="s",
        minimum=0.1,
    )

    transport: str = setting(
        "auto",
        help="how KV blocks move; auto: shm (shared memory) on a CPU if host is a loopback "
        "address and kv_interface is empty, otherwise nixl if it can be imported",
        choices=(AUTO, *TRANSPORTS),
    )
    grant_ttl_ms: int = setting(
        5000,
        help="how long a right to write KV blocks lives without renewal",
        unit="ms",
        minimum=100,
    )
    grant_margin_ms: int = setting(
        250,
        help="a write is posted only if its grant lives at least this much longer",
        unit="ms",
        minimum=1,
    )
    landing_ms: int = setting(
        1000,
        help="how long a posted write may still land after its writer's process is gone",
        unit="ms",
        minimum=10,
    )
    deployment_revision: str = setting(
        "",
        help="name of the deployment that this worker belongs to, for example a pod template's "
        "hash; the error of workers that refuse each other's KV blocks names both",
        pattern=r"[\w.:/+-]*",
    )
    kv_checksum: bool = setting(
        False,
        help="on a decode worker, compare a digest of every KV block that arrives; prefill "
        "workers send digests to those that ask for them",
    )

    kv_interface: tuple[str, ...] = setting(
        (),
        help="network interfaces or RDMA ports on which NIXL may listen for KV blocks of other "
        "hosts (eth0, mlx5_0:1); needed if --host is not a loopback address",
        pattern=r"[\w.:-]+",
    )
    allow_kv_over_tcp: bool = setting(
        False,
        help="let KV blocks of other hosts move over TCP on --kv-interface: anyone who reaches "
        "UCX's port there can write into this process, so only trusted machines may reach "
        "it",
    )

    kv_ports: str | None = setting(
        None,
        help="TCP ports that UCX may listen on for KV blocks, such as 41000-41099, so that "
        "network policies can name them (UCX_TCP_PORT_RANGE); none: any free port",
        pattern=r"[0-9]{1,5}-[0-9]{1,5}",
    )

    host: str = setting(
        "127.0.0.1",
        help="address to listen on; 0.0.0.0 or [::]: all addresses of this host or pod",
        pattern=r"\S+",
    )
    advertise_address: str | None = setting(
        None,
        help="address at which routers and other workers reach this worker; none: the address in "
        "host, or, if that is 0.0.0.0 or [::], the address from which this host (or pod) "
        "reaches the store",
        pattern=r"\S+",
    )
    control_port: int = setting(
        0, help="port of the control socket; 0: any free one", minimum=0, maximum=65535
    )
    events_port: int = setting(
        0, help="port of the event socket; 0: any free one", minimum=0, maximum=65535
    )
    metrics_port: int | None = setting(
        None,
        help="port for Prometheus /metrics and the probes /live (the step loop turns), /ready "
        "(registered) and /startup (loaded); open from the start; none: no such port; 0: "
        "any free port",
        minimum=0,
        maximum=65535,
    )
    probe_port: int | None = setting(
        None,
        help="port for the probes /live, /ready and /startup alone, on host; metrics_port serves "
        "them, too; none: no such port",
        minimum=0,
        maximum=65535,
    )
    metrics_host: str | None = setting(
        None,
        help="address to serve metrics and probes on, for everyone who can reach it; none: the "
        "address in host",
        pattern=r"\S+",
    )
    worker_id: str | None = setting(
        None,
        help="name of this worker, unique in the fleet; none: the role and six random hex digits",
        pattern=NAME_PATTERN,
    )

    lease_s: float = setting(
        2.0, help="how long a registration outlives its worker", unit="s", minimum=0.3
    )

    peer_silence_s: float = setting(
        10.0,
        help="silence after which a connected peer counts as lost, and after which no prefill "
        "worker is waited for; must be longer than the longest step",
        unit="s",
        minimum=2.0,
    )
    stall_alarm_s: float = setting(
        60.0,
        help="if requests wait and nothing is computed, granted or released for this long, the "
        "worker logs what holds its blocks, and gets no new requests until something "
        "happens",
        unit="s",
        minimum=1,
    )
    stats_interval_ms: int = setting(
        100, help="least time between two published load reports", unit="ms", minimum=1
    )
    stats_idle_ms: int = setting(
        1000, help="time after which load is reported even if nothing changed", unit="ms", minimum=1
    )
    drain_grace_s: float = setting(
        30.0, help="how long a stopping worker lets its requests finish", unit="s", minimum=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_ports is not None:
            first, last = map(int, self.kv_ports.split("-"))
            if not 0 < first <= last < 65536:
                raise ConfigError(f"kv_ports {self.kv_ports}: give two ports, the lower one first")
        if self.advertise_address is not None and is_wildcard(self.advertise_address):
            raise ConfigError(
                f"advertise_address {self.advertise_address} is not an address that others "
                "can reach"
            )


def choose_worker_id(role: str, configured: str | None) -> str:
    """The configured name, or the role and six random hex digits."""
    return configured or f"{role}-{secrets.token_hex(3)}"
