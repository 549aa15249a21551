"""Whether one worker can hand KV over to another, by what both have registered. Pure.

The rules name only what certainly fails; a pair that they allow may still refuse.
"""

from __future__ import annotations

from typing import NamedTuple

from protocol.registration import WorkerInfo

_ON_ONE_HOST = frozenset(("CUDA IPC", "CMA"))
"""Paths that do not leave a host."""


class HandoverFacts(NamedTuple):
    """The part of a registration that decides. `boot` names the host's running kernel; "" if it is
    unknown."""

    protocol_version: int
    layout_fingerprint: str
    transport: str
    paths: tuple[str, ...]
    boot: str


def facts_of(info: WorkerInfo) -> HandoverFacts:
    """The facts of a worker."""
    return HandoverFacts(
        info.protocol_version,
        info.layout_fingerprint,
        info.transport,
        info.transport_paths,
        info.machine.partition("/")[0],
    )


def why_apart(source: HandoverFacts, sink: HandoverFacts) -> str:
    """Why `source` cannot write to the pool of `sink`, said of the source; "" if these facts do not
    prevent it. Unknown paths and hosts prevent nothing."""
    if source == sink:
        return ""
    for what, theirs, wanted in (
        ("protocol version", source.protocol_version, sink.protocol_version),
        ("KV layout fingerprint", source.layout_fingerprint, sink.layout_fingerprint),
        ("transport", source.transport, sink.transport),
    ):
        if theirs != wanted:
            return f"its {what} is {theirs}, not {wanted}"
    are_apart = bool(source.boot and sink.boot) and source.boot != sink.boot
    if are_apart and source.transport == "shm":
        return "shared memory does not leave its host; both need the transport nixl"
    if not source.paths or not sink.paths:
        return ""
    common = set(source.paths) & set(sink.paths) - (_ON_ONE_HOST if are_apart else frozenset())
    if common:
        return ""
    own, other = ", ".join(source.paths), ", ".join(sink.paths)
    where = " between hosts" if are_apart else ""
    return f"its paths ({own}) and those there ({other}) have none in common{where}: see UCX_TLS"
