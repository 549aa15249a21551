"""Rules about what surrounds the fleet: the store, other routers, logs, tiers, the machines' CPU.

They judge facts, so they need no minimum number of requests.
"""

from __future__ import annotations

from console.doctor.client_goodput import clients_of
from console.doctor.facts import HostFacts
from console.doctor.finding import Bar, Change, Evidence, Finding, Number, Urgency
from console.doctor.observation import FEW_REQUESTS, Observation
from console.doctor.rules.targets import unreachable_tpot_ms, unreachable_ttft_ms
from process.number_text import count, percent, significant
from protocol.messages import Role

STORE_US = 3_000_000
"""A shorter silence of the store is a hiccup."""
STARVED = 0.3
"""If processes wait for a core in this share of their runnable time, steps take half as long
again."""
THROTTLED = 0.2
BUSY_CORES = 0.1
"""Below this use of a core, a process says nothing about its machine."""
OTHERS = 0.3
"""From this share of the busy cores, processes that are not the fleet's are to blame."""


def check_store(seen: Observation) -> Finding | str:
    """Whether the store answers."""
    store = seen.facts.store
    if store is None or seen.now_us - store.since_us < STORE_US:
        return "it answers"
    return Finding(
        rule="store",
        title="The store does not answer",
        text=(
            f"{store.trouble}. Requests go on with the workers last known; workers that start or "
            "leave are not noticed, and background responses cannot be kept.",
        ),
        evidence=Evidence(kind="store"),
        changes=(
            Change(
                setting="redis_url", scope="store",
                text="Look at the store: its process, its memory, the network. Workers and routers "
                "register again by themselves when it is back.",
            ),
        ),
    )  # fmt: skip


def check_routers(seen: Observation) -> Finding | str:
    """Whether other routers have fallen silent."""
    silent = seen.facts.routers
    if not silent:
        return "none has fallen silent"
    names = ", ".join(each.name for each in silent)
    return Finding(
        rule="routers",
        title=f"{names} {'has' if len(silent) == 1 else 'have'} fallen silent",
        text=(
            "It was killed, or hangs. Clients that reach it get no answer; streams that it had can "
            "be resumed at other routers.",
        ),
        evidence=Evidence(kind="routers", numbers=(Number(str(len(silent)), "silent"),)),
        changes=(
            Change(
                setting="logs", scope=names,
                text="Look at its log and its host, and start it again. Take it out of the load "
                "balancer while it hangs.",
            ),
        ),
    )  # fmt: skip


def check_logs(seen: Observation) -> Finding | str:
    """Whether processes can write their logs."""
    losing = seen.facts.logs
    if not losing:
        return "all are written"
    names = ", ".join(each.process for each in losing)
    lost = sum(each.lost for each in losing)
    return Finding(
        rule="logs",
        title=f"The {'log' if len(losing) == 1 else 'logs'} of {names} cannot be written",
        text=(
            f"{count(lost, 'line')} {'is' if lost == 1 else 'are'} lost. Requests go on; what "
            "happens there now is in no log.",
        ),
        evidence=Evidence(
            kind="lines lost",
            unit="lines",
            bars=tuple(Bar(each.process, each.lost, is_flagged=True) for each in losing[:8]),
        ),
        changes=(
            Change(
                setting="disk", scope=names,
                text="Free the disk to which its standard error goes (of `baton up`, the folder "
                "log_dir), or raise its limit on the size of files. The log goes on by itself.",
            ),
        ),
    )  # fmt: skip


def check_tiers(seen: Observation) -> Finding | str:
    """Whether blocks can be kept below the KV pools, and read from there."""
    failing = seen.facts.tiers
    if not failing:
        return "no block failed in the last minute"
    names = ", ".join(f"{each.worker_id} ({each.tier})" for each in failing)
    return Finding(
        rule="tiers",
        title=f"Blocks below the KV {'pool' if len(failing) == 1 else 'pools'} of {names} fail",
        text=(
            "They cannot be written, or are not what was written. Their tokens are computed again, "
            "and requests go on; the worker's log has the first error of each kind.",
        ),
        evidence=Evidence(
            kind="blocks that failed",
            unit="blocks",
            bars=tuple(
                Bar(f"{each.worker_id}, {each.tier}", each.failures, is_flagged=True)
                for each in failing[:8]
            ),
        ),
        changes=(_tier_change(names, any(each.tier == "disk" for each in failing)),),
    )


def _tier_change(names: str, is_disk: bool) -> Change:
    if is_disk:
        return Change(
            setting="disk_tier_dir", scope=names,
            text="Free the disk, set disk_tier_bytes lower, or use another one if it is broken. "
            "On a full disk the tier tries to grow again every minute.",
        )  # fmt: skip
    return Change(
        setting="host_tier_bytes", scope=names,
        text="Host memory that changes by itself is broken: move the worker to another machine.",
    )  # fmt: skip


def starved_host(seen: Observation) -> HostFacts | None:
    """The machine that starves the fleet most of CPU, if clients suffer and the lack of CPU
    explains the queues."""
    if not clients_of(seen.facts).suffer(seen.targets.goodput):
        return None
    starved = [each for each in seen.facts.hosts if _is_starved(each)]
    host = max(starved, key=lambda each: each.waiting_share + each.throttled_share, default=None)
    if host is None or _overload(seen) > _slowdown(host) or _is_out_of_reach(seen, host):
        return None
    return host


def _is_out_of_reach(seen: Observation, host: HostFacts) -> bool:
    """Whether a target would be missed even with all of the machine's CPU."""
    if len(seen.requests) < FEW_REQUESTS:
        return False
    tpot_ms, ttft_ms = unreachable_tpot_ms(seen), unreachable_ttft_ms(seen)
    return (tpot_ms or 0.0) / _slowdown(host) > seen.targets.tpot_ms or (
        ttft_ms or 0.0
    ) / _slowdown(host) > seen.targets.ttft_ms


def _slowdown(host: HostFacts) -> float:
    """The factor by which the lack of CPU makes everything slower there."""
    return 1 / max(0.05, 1 - max(host.waiting_share, host.throttled_share))


def _overload(seen: Observation) -> float:
    """The work as a multiple of what the pools can hold at once. Decode holds as many sequences as
    its batches have places. Prefill holds two prompts for each worker, one in work and one
    ready."""
    decode, prefill = seen.facts.usable(Role.DECODE), seen.facts.usable(Role.PREFILL)
    places = sum(each.max_batch_size or 0 for each in decode)
    sequences = sum(each.num_running + each.num_waiting for each in decode)
    prompts = sum(each.num_waiting for each in prefill)
    return max(
        sequences / places if places else 0.0, prompts / (2 * len(prefill)) if prefill else 0.0
    )


def _is_starved(host: HostFacts) -> bool:
    waits = host.waiting_share >= STARVED and host.own_cores >= BUSY_CORES
    return waits or host.throttled_share >= THROTTLED


def check_hosts(seen: Observation) -> Finding | str | None:
    """Whether a machine gives the fleet's processes less CPU than they need."""
    host = starved_host(seen)
    if host is None:
        most = max((each.waiting_share for each in seen.facts.hosts), default=None)
        if most is None or most >= STARVED:
            return None
        return f"processes wait for a core at most {percent(most)} of the time"
    others = max(0.0, host.busy_cores - host.own_cores)
    text, change = _starved_by(host, others)
    return Finding(
        rule="hosts",
        title=f"{host.name} is starved of CPU",
        text=(
            f"{', '.join(host.processes)} {'waits' if len(host.processes) == 1 else 'wait'} for "
            f"a core {percent(host.waiting_share)} of the time that they could run. {text}",
        ),
        urgency=Urgency.URGENT,
        evidence=Evidence(
            kind="cores in use",
            unit="cores",
            bars=(
                Bar("the fleet", round(host.own_cores, 2)),
                Bar("other processes", round(others, 2), others >= OTHERS * host.busy_cores),
            ),
            numbers=(
                Number(percent(host.waiting_share), "of runnable time waits"),
                Number(percent(host.throttled_share), "held up by a CPU limit"),
            ),
        ),
        changes=(change,),
    )


def _starved_by(host: HostFacts, others: float) -> tuple[str, Change]:
    if host.throttled_share >= THROTTLED:
        return "The CPU limit of its control group holds it up.", Change(
            setting="resources.limits.cpu", scope=host.name,
            text="Raise or remove the CPU limit of these processes.",
        )  # fmt: skip
    if others >= OTHERS * host.busy_cores:
        return f"Processes that are not the fleet's use {significant(others)} cores.", Change(
            setting="host", scope=host.name,
            text="Move or stop the other processes, or give these workers cores of their own.",
        )  # fmt: skip
    return "The fleet's own processes share too few cores.", Change(
        setting="host", scope=host.name,
        text="Run fewer workers there, or move some to another machine.",
    )  # fmt: skip
