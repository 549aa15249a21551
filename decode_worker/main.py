"""`baton decode`: one decode worker process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from decode_worker.pod_events import PodEvents, pod_events
from decode_worker.prefill_reach import PrefillReach
from decode_worker.resumption import Resumption
from decode_worker.role import DecodeRole
from decode_worker.settings import DecodeSettings
from process.settings import settings_or_exit
from protocol.messages import Role
from worker.assembly import run_worker
from worker.host import Surroundings, WorkerHost
from worker.inbound.assembly import make_peers, make_sink, make_source
from worker.inbound.source_links import SourcePeers
from worker.startup.step_limits import goes_ahead

PREFILL_REACHABLE = "baton/PrefillReachable"
"""The type of a condition of the pod."""


def main(argv: Sequence[str]) -> int:
    """Run until told to stop; returns the exit status."""
    settings = settings_or_exit(
        DecodeSettings,
        argv,
        prog="baton decode",
        description="A decode worker: takes over prefilled sequences and generates their tokens.",
    )

    def build(host: WorkerHost, surroundings: Surroundings) -> DecodeRole:
        source, sink = make_source(host), make_sink(host, surroundings.descriptor.agent)
        peers = make_peers(host, surroundings)
        resumption = Resumption(host, settings.resume_grace_s)
        host.engine.run_ahead(int(goes_ahead(settings)))
        reach = _reach(settings, host, peers, surroundings)
        return DecodeRole(host, sink, source, peers, reach, resumption)

    return run_worker(settings, Role.DECODE, build)


def _reach(
    settings: DecodeSettings, host: WorkerHost, peers: SourcePeers, around: Surroundings
) -> PrefillReach:
    """The watch on prefill workers, connected to metrics, readiness and the pod's Events."""
    events = pod_events(settings.pod_name, settings.pod_uid)
    if events is not None:
        around.stack.callback(events.close)

    reach = PrefillReach(
        peers.obstacles,
        peers.retry_closed,
        settings.peer_silence_s,
        settings.require_prefill,
        pod_reporter(events, settings.pod_conditions),
    )
    host.watch_prefill(lambda: reach.is_lost)
    around.add_check(reach.not_ready_reason)
    return reach


def pod_reporter(events: PodEvents | None, has_conditions: bool) -> Callable[[bool, str], None]:
    """A function that shows on the pod, if there is one, whether prefill workers can be reached. It
    writes an Event when they are lost, and when they are back. With `has_conditions` it also sets a
    condition of the pod."""
    was_lost = False

    def report(is_lost: bool, text: str) -> None:
        nonlocal was_lost
        if events is not None:
            reason = "PrefillUnreachable" if is_lost else "PrefillReachable"
            if is_lost or was_lost:
                events.write(reason, text, is_warning=is_lost)
            if has_conditions:
                events.set_condition(PREFILL_REACHABLE, not is_lost, reason, text)
        was_lost = is_lost

    return report


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
