"""Settings of `baton preflight`; those of workers mean the same here."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import setting, setting_of
from worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class PreflightSettings:
    """Settings of one of the processes that check their nodes together."""

    redis_url: str = setting_of(WorkerSettings, "redis_url")
    redis_ca_file: str | None = setting_of(WorkerSettings, "redis_ca_file")
    redis_cert_file: str | None = setting_of(WorkerSettings, "redis_cert_file")
    redis_key_file: str | None = setting_of(WorkerSettings, "redis_key_file")
    cluster: str = setting_of(WorkerSettings, "cluster")
    cluster_secret: str = setting_of(WorkerSettings, "cluster_secret")
    device: str = setting_of(WorkerSettings, "device")
    transport: str = setting_of(WorkerSettings, "transport")
    host: str = setting_of(WorkerSettings, "host")
    kv_interface: tuple[str, ...] = setting_of(WorkerSettings, "kv_interface")
    allow_kv_over_tcp: bool = setting_of(WorkerSettings, "allow_kv_over_tcp")
    kv_ports: str | None = setting_of(WorkerSettings, "kv_ports")
    advertise_address: str | None = setting_of(WorkerSettings, "advertise_address")
    tensor_parallel: int = setting_of(WorkerSettings, "tensor_parallel")
    pipeline_parallel: int = setting_of(WorkerSettings, "pipeline_parallel")
    nnodes: int | None = setting_of(
        WorkerSettings,
        "nnodes",
        help="hosts of one worker whose ranks' ways to each other are checked; equal to "
        "preflight_processes, and process 0 is the head; none: 1, which checks no such ways",
    )
    master_addr: str | None = setting_of(
        WorkerSettings, "master_addr", help="address of the host of process 0, the worker's head"
    )
    master_port: int = setting_of(WorkerSettings, "master_port")

    preflight_run: str = setting(
        help="name of this run, the same in all its processes and new each time",
        pattern=r"[\w.-]{1,100}",
    )
    preflight_index: int = setting(
        0,
        help="number of this process, from 0",
        minimum=0,
        env="JOB_COMPLETION_INDEX",  # as Kubernetes sets it in Jobs that count their pods
    )
    preflight_processes: int = setting(2, help="processes that check together", minimum=1)
    preflight_mib: int = setting(
        256, help="KV blocks to move to each other process", unit="MiB", minimum=1
    )
    wait_s: float = setting(
        600.0, help="how long to wait for the other processes", unit="s", minimum=0
    )

    @property
    def num_nodes(self) -> int:
        """The hosts of the worker."""
        return self.nnodes or 1

    @property
    def num_ranks(self) -> int:
        """The ranks of the worker."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def is_head(self) -> bool:
        """Whether this host is that of the worker's head."""
        return self.preflight_index == 0
