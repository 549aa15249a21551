"""`baton prefill`: one prefill worker process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from prefill_worker.role import PrefillRole
from prefill_worker.settings import PrefillSettings
from process.settings import settings_or_exit
from protocol.messages import Role
from worker.assembly import run_worker
from worker.host import Surroundings, WorkerHost
from worker.inbound.assembly import make_peers, make_sink, make_source
from worker.startup.step_limits import prefill_steps_ahead


def main(argv: Sequence[str]) -> int:
    """Run until told to stop; returns the exit status."""
    settings = settings_or_exit(
        PrefillSettings,
        argv,
        prog="baton prefill",
        description="A prefill worker: computes prompts and streams their KV blocks out.",
    )

    def build(host: WorkerHost, surroundings: Surroundings) -> PrefillRole:
        host.engine.run_ahead(*prefill_steps_ahead(settings))
        source, sink = make_source(host), make_sink(host, surroundings.descriptor.agent)
        return PrefillRole(host, source, sink, make_peers(host, surroundings))

    return run_worker(settings, Role.PREFILL, build)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
