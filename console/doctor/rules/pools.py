"""Workers that the fleet lacks: a whole pool, or single workers. The rules judge facts, so they
need no requests."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from console.doctor.client_goodput import clients_of
from console.doctor.facts import WorkerStanding
from console.doctor.finding import Change, Evidence, Finding, Number, Urgency
from console.doctor.observation import Observation
from process.number_text import count, integer
from protocol.messages import Role

SILENT_US = 8_000_000
"""A worker in a long step answers within this time."""
STUCK_US = 30 * 60_000_000
"""The largest checkpoints load within this time, also from slow volumes."""
MAX_NAMED = 3

_PATIENCE_US = {"silent": SILENT_US, "starting": STUCK_US}
_REMEDIES = {
    "lost": ("logs", "Start it again. The last lines of its log name the cause: memory, the "
             "device, or a request that kills it."),
    "silent": ("logs", "Its process hangs or is stopped: look at its log and at its host, then "
               "restart it."),
    "stalled": ("logs", "Look at its log, and at `baton trace --process` of it; then restart it."),
    "other_model": ("model", "Start it with the fleet's model, or in a cluster of its own."),
    "other_layout": ("dtype, kv_dtype, kv_order, kv_windows, block_size", "Give it the fleet's "
                     "values: its log shows what its layout stands for."),
    "other_protocol": ("release", "Give routers and workers the same release."),
    "other_secret": ("cluster_secret", "Give it the secret of this router, or a cluster of its "
                     "own."),
    "address": ("advertise_address, control_port", "Register it at an address that routers reach, "
                "and open its ports to them."),
    "connection_broke": ("network", "Look at its process, and at the network between it and this "
                         "router."),
}  # fmt: skip


def check_pools(seen: Observation) -> Finding | str | None:
    """Whether a pool has no usable worker left."""
    facts = seen.facts
    if not facts.pool(Role.DECODE) and not clients_of(facts).refused:
        return None
    if not facts.usable(Role.DECODE):
        return _decode_gone(seen)
    missed = _missed(seen, Role.PREFILL)
    if missed and not facts.usable(Role.PREFILL):
        return _prefill_gone(missed, "The prefill pool is gone: decode workers compute prompts")
    if facts.apart:
        return _apart(seen)
    cut_off = [each for each in facts.usable(Role.DECODE) if each.prefill_unreachable]
    if cut_off and facts.usable(Role.PREFILL):
        return _cut_off(cut_off)
    parts = [
        count(len(facts.usable(role)), f"{role.value} worker")
        for role in (Role.PREFILL, Role.DECODE)
    ]
    return f"{' and '.join(parts)} usable"


def _decode_gone(seen: Observation) -> Finding | None:
    missed, refused = _missed(seen, Role.DECODE), clients_of(seen.facts).refused
    if not missed and not refused:
        return None  # the first workers start, or the last ones drain, and no request waits
    is_lost = any(each.condition in ("lost", "silent") for each in missed)
    title = "No decode worker is left" if is_lost else "No decode worker is usable"
    return Finding(
        rule="pools",
        title=title,
        text=("Every request is refused.", *_standings(missed)),
        urgency=Urgency.URGENT,
        evidence=Evidence(
            kind="the last minute", numbers=(Number(integer(refused), "requests refused"),)
        ),
        changes=_changes(missed)
        or (Change(setting="decode workers", scope="decode pool", text="Start decode workers."),),
    )


def _prefill_gone(missed: Sequence[WorkerStanding], title: str) -> Finding:
    return Finding(
        rule="pools",
        title=title,
        text=(
            "Requests go on. Their prompts hold up the streams of the decode workers.",
            *_standings(missed),
        ),
        urgency=Urgency.URGENT,
        evidence=Evidence(kind="prefill pool", numbers=(Number("0", "usable workers"),)),
        changes=_changes(missed),
    )


def _apart(seen: Observation) -> Finding:
    """Pairs that cannot hand over: all of them, or some."""
    facts = seen.facts
    apart, num_pairs = facts.apart, len(facts.usable(Role.PREFILL)) * len(facts.usable(Role.DECODE))
    is_all = len(apart) >= num_pairs
    title = "No prefill worker can hand over to a decode worker"
    text = "Decode workers compute prompts, which hold up their streams."
    if not is_all:
        title = f"{count(len(apart), 'pair')} of {num_pairs} cannot hand over"
        text = "Requests use the other pairs, or decode workers compute their prompts."
    shown = [f"{e.prefill} to {e.decode}: {e.reason}." for e in apart[: 2 * MAX_NAMED]]
    more = len(apart) - len(shown)
    return Finding(
        rule="pools",
        title=title,
        text=(text, *shown, *((f"And {more} more.",) if more else ())),
        urgency=Urgency.URGENT if is_all else Urgency.SOON,
        evidence=Evidence(
            kind="pairs",
            numbers=(
                Number(integer(len(apart)), "cannot hand over"),
                Number(integer(num_pairs), "in all"),
            ),
        ),
        changes=(
            Change(
                setting="transport, UCX_TLS, kv_checksum", scope="both pools",
                text="Give both pools the same values, and restart those that differ.",
            ),
        ),
    )  # fmt: skip


def _cut_off(workers: Sequence[WorkerStanding]) -> Finding:
    names = _names(workers)
    return Finding(
        rule="pools",
        title=f"{names} {_verb(workers, 'reaches', 'reach')} no prefill worker",
        text=("Prefill workers are there, and these decode workers compute prompts themselves.",),
        evidence=Evidence(kind="cut off", numbers=(Number(str(len(workers)), "decode workers"),)),
        changes=(
            Change(
                setting="network", scope=names,
                text="Open the control ports of the prefill workers to it; its log names the "
                "address that does not answer.",
            ),
        ),
    )  # fmt: skip


def check_workers(seen: Observation) -> Finding | str | None:
    """Whether the fleet lacks single workers, and why."""
    facts = seen.facts
    missed = [
        each
        for role in (Role.DECODE, Role.PREFILL)
        if facts.usable(role)
        for each in _missed(seen, role)
    ]
    if not facts.workers:
        return None
    if not missed:
        return f"{count(len([e for e in facts.workers if e.is_usable]), 'worker')}, none missing"
    first = missed[0]
    title = f"{_names(missed)} {_verb(missed, 'is', 'are')} {first.condition}"
    if len({each.condition for each in missed}) > 1:
        title = f"{_names(missed)} are not usable"
    if any(each.cause in ("other_model", "other_layout", "other_protocol") for each in missed[:1]):
        title = f"{_names(missed)} {_verb(missed, 'is', 'are')} not used"
    is_suffering = clients_of(facts).suffer(seen.targets.goodput)
    return Finding(
        rule="workers",
        title=title,
        text=_standings(missed),
        urgency=Urgency.URGENT if is_suffering else Urgency.SOON,
        evidence=Evidence(
            kind="workers",
            numbers=(
                Number(str(len(missed)), "not usable"),
                Number(str(sum(each.is_usable for each in facts.workers)), "usable"),
            ),
        ),
        changes=_changes(missed),
    )


def _missed(seen: Observation, role: Role) -> list[WorkerStanding]:
    """The workers of a role that the fleet has lacked for longer than a moment, and those that do
    not finish starting."""
    return [
        each
        for each in seen.facts.pool(role)
        if (each.is_missed or (each.condition == "starting" and each.since_us))
        and seen.now_us - each.since_us >= _PATIENCE_US.get(each.condition, 0)
    ]


def _standings(missed: Sequence[WorkerStanding]) -> tuple[str, ...]:
    shown = [
        f"{each.worker_id} is {each.condition} since {_clock(each.since_us)}: {each.reason}."
        for each in missed[: 2 * MAX_NAMED]
    ]
    more = len(missed) - len(shown)
    return (*shown, f"And {more} more.") if more else tuple(shown)


def _changes(missed: Sequence[WorkerStanding]) -> tuple[Change, ...]:
    """One change for each cause."""
    found = []
    for cause in dict.fromkeys(each.cause for each in missed):
        names = _names([each for each in missed if each.cause == cause])
        setting, text = _REMEDIES.get(cause or "", ("logs", "Look at its log."))
        found.append(Change(setting=setting, scope=names, text=text))
    return tuple(found)


def _names(workers: Sequence[WorkerStanding]) -> str:
    names = [each.worker_id for each in workers]
    if len(names) > MAX_NAMED:
        shown = names[: MAX_NAMED - 1]
        return f"{', '.join(shown)} and {count(len(names) - len(shown), 'more worker')}"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _verb(workers: Sequence[WorkerStanding], one: str, many: str) -> str:
    return one if len(workers) == 1 else many


def _clock(at_us: int) -> str:
    return f"{datetime.fromtimestamp(at_us / 1e6, UTC):%H:%M:%S} UTC"
