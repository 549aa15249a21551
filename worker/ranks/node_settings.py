"""Settings of a worker whose ranks span several hosts."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import setting
from process.settings.shared import SharedSettings

MAX_NODES = 64


@dataclass(frozen=True, kw_only=True)
class NodeSettings(SharedSettings):
    """The settings with which the hosts of one worker find each other. The names are torchrun's."""

    nnodes: int | None = setting(
        None,
        help="hosts that the worker's ranks lie on, equally many on each; none: LWS_GROUP_SIZE of "
        "a LeaderWorkerSet, else 1",
        unit="hosts",
        minimum=1,
        maximum=MAX_NODES,
    )
    node_rank: int | None = setting(
        None,
        help="number of this host among them; 0 is the head, which serves; none: LWS_WORKER_INDEX, "
        "else 0",
        minimum=0,
        maximum=MAX_NODES - 1,
    )
    master_addr: str | None = setting(
        None,
        help="address of the host of node_rank 0, to which its ranks and those of the other hosts "
        "connect; none: LWS_LEADER_ADDRESS",
        pattern=r"\S+",
    )
    master_port: int = setting(
        29500,
        help="port at which the head listens for the other hosts of its worker",
        minimum=1,
        maximum=65535,
    )
    join_s: float = setting(
        600.0,
        help="how long the hosts of a worker wait for one another at the start",
        unit="s",
        minimum=1.0,
    )

    @property
    def num_nodes(self) -> int:
        """The hosts of the worker."""
        return self.nnodes or 1

    @property
    def is_head(self) -> bool:
        """Whether this process serves requests."""
        return not self.node_rank
