"""From the settings of a fleet to the command line and environment of each of its processes.

Flags carry the fleet's settings and those that differ between processes; secrets go by
environment. A process reads the operator's own environment variables and file directly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.child import Child, baton_command, baton_environment
from cli.commands import COMMANDS
from cli.up_settings import TO_STDOUT, UpSettings
from engine.cpu_quota import threads_within_quota
from process.core_shares import by_neighbourhood, core_shares
from process.cores import can_keep_to_cores, ranges_of, usable_cores
from process.settings.loader import CONFIG_ENV
from process.settings.spec import ENV_PREFIX, specs_of
from protocol.layout import PAIRS
from protocol.messages import Role

WORKER_HOST = "127.0.0.1"
POOLS_FRACTION = 0.6
_OWN = frozenset(
    {"host", "port", "redis_url", "cluster_secret", "torch_threads", "responses_store"}
)
_GPU_DEVICE = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class Secrets:
    """Secrets that children get by environment, never as arguments."""

    redis_url: str = field(repr=False)
    cluster_secret: str = field(repr=False)
    supervisor_key: str = field(repr=False)


class ChildSettings:
    """Creates the children of one fleet.

    `forwarded` names the settings to forward as flags: those that the operator gave as flags.
    None forwards all that differ from their defaults; children then see none of our BATON_
    variables and no file. `environ` is the environment that children inherit.
    """

    def __init__(
        self,
        settings: UpSettings,
        forwarded: frozenset[str] | None = None,
        environ: Mapping[str, str] | None = None,
        config_path: str | None = None,
    ) -> None:
        self._settings = settings
        self._specs = specs_of(UpSettings)
        self._inherits = forwarded is not None
        self._forwarded = self._changed() if forwarded is None else forwarded
        self._environ = dict(os.environ if environ is None else environ)
        if config_path is not None:
            self._environ[CONFIG_ENV] = str(Path(config_path).resolve())

    @property
    def torch_threads(self) -> int:
        """CPU threads of each worker: the setting, or an even share of the cores, or of the threads
        that a container's CPU quota allows."""
        if self._settings.torch_threads is not None:
            return self._settings.torch_threads
        return max(1, threads_within_quota(len(usable_cores())) // self._num_workers)

    @property
    def core_shares(self) -> list[list[int]]:
        """The cores each worker is pinned to, prefill workers first; empty if none is pinned."""
        if not self._settings.pin or not can_keep_to_cores() or self._is_on_gpu:
            return []
        cores = by_neighbourhood(usable_cores())
        return core_shares(cores, self._num_workers, self.torch_threads)

    def worker(
        self,
        role: Role,
        worker_id: str,
        shared: Secrets,
        log_dir: Path,
        cores: Sequence[int] = (),
    ) -> Child:
        """A worker, not started yet, pinned to `cores` if there are any."""
        own: dict[str, Any] = {
            "worker_id": worker_id,
            "host": WORKER_HOST,
            "torch_threads": self.torch_threads,
        }
        if self._has_ranks:
            ranks = self._ranks_of(role) | self._peers_of(role)
            own |= ranks | {"kv_order": self._shared_order}
        if cores:
            own["cores"] = ranges_of(cores)
        fraction = self._memory_fraction()
        if fraction is not None:
            own["memory_fraction"] = fraction
        return self._child(role, worker_id, own, _environment_of(shared), log_dir)

    def router(self, shared: Secrets, port_file: Path, log_dir: Path) -> Child:
        """The router, not started yet."""
        own = {
            "host": self._settings.host,
            "port": self._settings.port,
            "port_file": str(port_file),
            "responses_store": self._settings.responses_store,
        }
        secrets = {**_environment_of(shared), "supervisor_key": shared.supervisor_key}
        return self._child(Role.ROUTER, "router", own, secrets, log_dir)

    def _child(
        self, role: Role, name: str, own: dict[str, Any], secrets: dict[str, str], log_dir: Path
    ) -> Child:
        specs = specs_of(COMMANDS[role.value].load_settings_class())
        values = {"parent_pid": os.getpid(), **own}
        if self._settings.log_to == TO_STDOUT:
            values["log_format"] = "json"
        for field_name in self._specs:
            if field_name in self._forwarded and field_name in specs and field_name not in _OWN:
                values[field_name] = getattr(self._settings, field_name)
        if "kv_order" in own:  # chosen for all workers, even if the setting is auto
            values["kv_order"] = own["kv_order"]
        flags = [f"{specs[key].flag_name}={specs[key].to_text(values[key])}" for key in values]
        env = self._environment({spec.env_name for spec in specs.values()})
        env |= {specs[key].env_name: value for key, value in secrets.items()}
        command = baton_command(role.value, *flags)
        return Child(name, role, command, baton_environment(env), log_dir / f"{name}.log")

    def _environment(self, names: set[str]) -> dict[str, str]:
        """The environment of a child; it has only those BATON_ variables that the child knows."""
        allowed = names | {CONFIG_ENV} if self._inherits else set()
        return {
            name: value
            for name, value in self._environ.items()
            if not name.startswith(ENV_PREFIX) or name in allowed
        }

    def _changed(self) -> frozenset[str]:
        return frozenset(
            name
            for name, spec in self._specs.items()
            if getattr(self._settings, name) != spec.default
        )

    def _memory_fraction(self) -> float | None:
        """Each worker's share of the memory on a CPU; None leaves the worker its own default."""
        settings = self._settings
        is_told = settings.num_blocks is not None or settings.memory_fraction is not None
        if is_told or self._is_on_gpu:
            return None
        return round(min(0.3, POOLS_FRACTION / self._num_workers), 3)

    @property
    def _is_on_gpu(self) -> bool:
        device = self._settings.device
        return device.startswith("cuda") or (device == "auto" and _GPU_DEVICE.exists())

    @property
    def _has_ranks(self) -> bool:
        workers = (self._ranks_of(role) for role in (Role.PREFILL, Role.DECODE))
        return any(max(ranks.values()) > 1 for ranks in workers)

    def _ranks_of(self, role: Role) -> dict[str, int]:
        """The settings of this role's workers that split the model."""
        names = ("tensor_parallel", "pipeline_parallel")
        return {name: getattr(self._settings, f"{role.value}_{name}") for name in names}

    def _peers_of(self, role: Role) -> dict[str, int]:
        """The settings that tell this role's workers the ranks of the other role's. Shared memory
        is copied as fast in small pieces as in large ones."""
        if self._settings.transport != "nixl":
            return {}
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        return {f"peer_{name}": count for name, count in self._ranks_of(other).items()}

    @property
    def _shared_order(self) -> str:
        """An order of KV blocks that workers of any number of ranks have."""
        order = self._settings.kv_order
        return PAIRS if order == "auto" else order

    @property
    def _num_workers(self) -> int:
        return self._settings.prefill + self._settings.decode


def _environment_of(shared: Secrets) -> dict[str, str]:
    """The secrets that every process of a fleet gets."""
    return {"redis_url": shared.redis_url, "cluster_secret": shared.cluster_secret}
