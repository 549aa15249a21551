"""The facts as parts of the object of `GET /fleet`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from console.doctor.facts import Facts
from process.number_text import count
from protocol.messages import Role


def facts_json(facts: Facts, serving: Sequence[str], store_notice: str | None) -> dict[str, Any]:
    """The parts `pools`, `keys`, `store`, `routers`, `hosts`, `logs`, `tiers` and `apart`;
    `serving` names the other routers that are alive, `store_notice` is a notice about the store
    for operators."""
    store = facts.store
    routers: list[dict[str, Any]] = [
        {"name": each, "state": "serving", "since_us": None} for each in serving
    ]
    routers += [
        {"name": each.name, "state": "silent", "since_us": each.since_us} for each in facts.routers
    ]
    return {
        "pools": {role.value: _pool_json(facts, role) for role in (Role.PREFILL, Role.DECODE)},
        "keys": [_all_fields(each) for each in facts.keys],
        "store": {
            "trouble": None if store is None else store.trouble,
            "since_us": None if store is None else store.since_us,
            "notice": store_notice,
        },
        "routers": routers,
        "hosts": [_all_fields(each) for each in facts.hosts],
        "logs": [_all_fields(each) for each in facts.logs],
        "tiers": [_all_fields(each) for each in facts.tiers],
        "apart": [_all_fields(each) for each in facts.apart],
    }


def lost_log(log: Mapping[str, Any]) -> str:
    """A process of `logs` in words."""
    lost = count(log["lost"], "line")
    return f"{log['process']} cannot write its log: {lost} lost; it serves on."


def apart_line(pairs: Sequence[Mapping[str, Any]]) -> str:
    """The pairs of `apart` in one line; "" if there are none."""
    if not pairs:
        return ""
    first, more = pairs[0], len(pairs) - 1
    others = f" (and {count(more, 'more pair')})" if more else ""
    return (
        f"{first['prefill']} cannot hand over to {first['decode']}{others}: {first['reason']}; "
        "requests use other pairs, or decode workers compute the prompts."
    )


def _pool_json(facts: Facts, role: Role) -> dict[str, Any]:
    pool, usable = facts.pool(role), facts.usable(role)
    return {
        "usable": len(usable),
        "starting": sum(each.condition == "starting" for each in pool),
        "draining": sum(each.condition == "draining" for each in pool),
        "unusable": len(facts.missed(role)),
        "waiting": sum(each.num_waiting for each in usable),
        "running": sum(each.num_running for each in usable),
        "places": sum(each.max_batch_size or 0 for each in usable) or None,
    }


def _all_fields(value: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}
