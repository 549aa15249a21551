"""A worker's registration under its lease: its identity, its model, its endpoints."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.field_bounds import Count, Duration, Endpoint, Name, Pid, Size, Text
from protocol.layout import MAX_LAYERS
from protocol.messages import Role


class WorkerState(StrEnum):
    """A worker's state as its lease shows it; only READY workers get new requests. A STALLED worker
    has waiting requests but has made no progress for long; with progress it is READY again."""

    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"
    DRAINING = "draining"


class KeptWindow(msgspec.Struct, frozen=True):
    """What layers with a window keep. Their blocks have `size` times the bytes of a block of the
    first group. A request has at most `most` of them, and a prefix needs `cover` of them to
    continue after it."""

    size: Annotated[float, Meta(gt=0, le=MAX_LAYERS)]
    most: Count
    cover: Count

    def of_request(self, num_blocks: int) -> float:
        """The memory of a request of `num_blocks` blocks here, in blocks of the first group."""
        return self.size * min(self.most, num_blocks)

    def of_prefix(self, num_blocks: int) -> float:
        """The data that moves with `num_blocks` blocks of the first group, counted in blocks of
        that group."""
        return self.size * min(self.cover, num_blocks)


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's registration under its lease, readable by every process. Bounds of the fields are
    checked on reading, because anyone who can use the store may have written it.

    - `incarnation`: new for every process, so a restarted worker counts as another worker.
    - `control`, `events`: ZeroMQ endpoints (ROUTER and PUB).
    - `machine`: processes with the same value see each other's `pid`; "" means an unknown machine.
    - `transport_paths`: the paths that KV may take, best first; `machine_paths`: those that it
      could take if `UCX_TLS` did not narrow them.
    - `chosen`: settings that a diagnosis may advise to change, by name.
    - `texts_fingerprint`: identifies the configuration and the tokenizer; a router compares it with
      its own.
    - `start_ms`: the time of each phase of its start, in the order of the phases; empty until it
      has registered.
    - `sends_weights`: it sends its weights to workers that start.
    - `tensor_parallel`, `pipeline_parallel`: the ranks over which each layer of its model is split,
      and the stages into which the layers are.
    - `num_blocks`: the pool's size in blocks; with several groups of layers, the number of blocks
      that the first group would have with all the memory; `block_bytes`: bytes of such a block on
      all ranks, 0 if unknown.
    - `has_windows`: some of its layers keep a window of tokens only, so a cached prefix can be used
      up to the ends that the worker reports. `windows` describes their groups, except for the first
      group.
    - `weight_version`: the commit of its model's weights, if they came from a hub; `revision`: that
      of its deployment. Both are for people; "" if unknown.

    The limits of a step and the grace of a drain are the worker's settings; 0 if unknown.
    """

    worker_id: Name
    incarnation: Name
    role: Role
    state: WorkerState
    host: Text
    pid: Pid
    control: Endpoint
    events: Endpoint
    protocol_version: Count
    model: Text
    model_fingerprint: Text
    layout_fingerprint: Text
    transport: Text
    block_size: Size
    num_blocks: Count
    max_context: Count
    machine: Text = ""
    texts_fingerprint: Text = ""
    transport_paths: Annotated[tuple[Text, ...], Meta(max_length=256)] = ()
    machine_paths: Annotated[tuple[Text, ...], Meta(max_length=256)] = ()
    chosen: Annotated[dict[Text, Text], Meta(max_length=1024)] = {}
    max_batch_size: Count = 0
    chunk_max_tokens: Count = 0
    itl_target_ms: Duration = 0.0
    drain_grace_s: Duration = 0.0
    start_ms: Annotated[dict[Text, Count], Meta(max_length=256)] = {}
    sends_weights: bool = False
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    has_windows: bool = False
    windows: Annotated[tuple[KeptWindow, ...], Meta(max_length=64)] = ()
    block_bytes: Count = 0
    weight_version: Text = ""
    revision: Text = ""

    @property
    def generation(self) -> str:
        """The worker's weights and its deployment, for people."""
        return generation(self.weight_version, self.revision)


def generation(weight_version: str, revision: str) -> str:
    """The weights and the deployment of a worker, for people; "" if neither is known."""
    known = (("weights", weight_version), ("deployment", revision))
    return ", ".join(f"{what} {name}" for what, name in known if name)
