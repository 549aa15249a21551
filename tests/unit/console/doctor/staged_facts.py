"""Facts of fleets in trouble, as a router would know them, for tests of headline and rules."""

from __future__ import annotations

from typing import Any

import msgspec

from console.doctor.facts import (
    ApartFacts,
    Facts,
    HostFacts,
    KeyFacts,
    LogFacts,
    LoopFacts,
    RouterFacts,
    StoreFacts,
    TierFacts,
    WorkerStanding,
)
from console.doctor.observation import Observation, Targets
from protocol.messages import Role

NOW_US = 1_790_000_000_000_000
SINCE_US = NOW_US - 9_000_000
GOOD = KeyFacts(accepted=60, ended=60, good=60)
BAD = KeyFacts(accepted=60, ended=60, good=49)


def worker(worker_id: str, **fields: Any) -> WorkerStanding:
    """A usable worker with some load, unless `fields` say otherwise."""
    usual: dict[str, Any] = {
        "role": Role(worker_id.partition("-")[0]), "max_batch_size": 16, "num_running": 2,
        "blocks_total": 800, "blocks_used": 100,
    }  # fmt: skip
    return WorkerStanding(worker_id=worker_id, **(usual | fields))


def gone(worker_id: str, cause: str, reason: str = "its lease ended") -> WorkerStanding:
    """A worker that the fleet has lacked for nine seconds."""
    conditions = {"lost": "lost", "silent": "silent", "address": "not connected"}
    return worker(
        worker_id, condition=conditions.get(cause, "refused"), cause=cause, reason=reason,
        since_us=SINCE_US, num_running=0,
    )  # fmt: skip


FLEET = (worker("prefill-1"), worker("decode-1"), worker("decode-2"))
APART = ApartFacts(
    prefill="prefill-1",
    decode="decode-1",
    reason="its transport is nixl, not shm",
    since_us=SINCE_US,
)
STARVED = HostFacts(
    name="host-7", waiting_share=0.55, busy_cores=2.0, own_cores=0.7, processes=("decode-1",)
)


def seen(
    *workers: WorkerStanding, keys: tuple[KeyFacts, ...] = (GOOD,), **fields: Any
) -> Observation:
    """An observation of facts alone: no request has been judged."""
    names = ("store", "routers", "hosts", "logs", "tiers", "loop", "apart")
    facts = {name: fields.pop(name) for name in names if name in fields}
    whole = Observation(
        now_us=NOW_US,
        targets=Targets(ttft_ms=1000, tpot_ms=50),
        pressure_prefill=0.4,
        pressure_decode=0.53,
        facts=Facts(workers=workers or FLEET, keys=keys, **facts),
    )
    return msgspec.structs.replace(whole, **fields)


NO_KEYS: tuple[KeyFacts, ...] = ()
REFUSED = (KeyFacts(refused=450),)
WAITING = (KeyFacts(accepted=4, ended=4, good=0, waiting=76, late=76),)
FLOOD = (
    KeyFacts(name="batch", accepted=80, limited=944, ended=80, good=10, waiting=20, late=12),
    KeyFacts(name="chat", accepted=60, ended=60, good=60),
)
STORE = StoreFacts(trouble="redis://store:6379 cannot be reached: timeout", since_us=SINCE_US)
ROUTERS = (RouterFacts(name="router-b (host, pid 7)", since_us=SINCE_US),)

HEALTHY = {
    "idle": seen(keys=NO_KEYS),
    "busy": seen(),
    "one client missed": seen(keys=(KeyFacts(accepted=100, ended=100, good=99),)),
    "decode workers only": seen(worker("decode-1"), worker("decode-2")),
    "a rolling restart": seen(
        worker("prefill-1", condition="draining"), worker("prefill-2", condition="starting"),
        worker("decode-1"), worker("decode-2", condition="draining"),
    ),
    "a lost worker that was replaced": seen(
        *FLEET, worker("decode-0", condition="lost", cause="lost", is_replaced=True)
    ),
    "a busy host whose clients are content": seen(hosts=(STARVED,)),
    "workers of two sizes": seen(worker("prefill-1"), worker("decode-1", blocks_total=300),
                                 worker("decode-2")),
    "a hiccup of the store": seen(store=StoreFacts(trouble="timeout", since_us=NOW_US - 10**6)),
    "a worker in a long step": seen(
        worker("decode-1"), worker("prefill-1", condition="silent", cause="silent",
                                   reason="it does not answer", since_us=NOW_US - 3 * 10**6),
    ),
    "a router that is late while clients are content": seen(
        loop=LoopFacts(lag_ms=41.0, worst_ms=90.0)
    ),
    "some invalid requests": seen(keys=(KeyFacts(accepted=100, ended=100, good=100, invalid=60),)),
    "a key at its limit": seen(keys=(KeyFacts(name="a", accepted=600, limited=30, ended=600,
                                              good=600),)),
}  # fmt: skip

TROUBLE = {
    "80 clients for 4 places": (
        seen(
            worker("prefill-1"),
            worker("decode-1", max_batch_size=4, num_running=4, num_waiting=76),
            keys=WAITING, pressure_decode=9.1, short=(Role.DECODE,),
        ),
        "Decode is short", "pool_balance",
    ),
    "80 clients for 4 places, who have their first tokens": (
        seen(
            worker("prefill-1"),
            worker("decode-1", max_batch_size=4, num_running=3, num_waiting=77),
            pressure_decode=20.0, short=(Role.DECODE,),
        ),
        "Decode is short", "pool_balance",
    ),
    "80 clients for 4 places on a busy machine": (
        seen(
            worker("prefill-1"),
            worker("decode-1", max_batch_size=4, num_running=4, num_waiting=76),
            keys=WAITING, pressure_decode=9.1, short=(Role.DECODE,), hosts=(STARVED,),
        ),
        "Decode is short", "pool_balance",
    ),
    "all decode workers killed": (
        seen(worker("prefill-1"), gone("decode-1", "lost"), gone("decode-2", "lost"),
             keys=REFUSED),
        "No decode worker is left", "pools",
    ),
    "all decode workers killed, nobody asks": (
        seen(worker("prefill-1"), gone("decode-1", "lost"), keys=NO_KEYS),
        "No decode worker is left", "pools",
    ),
    "the only prefill worker killed": (
        seen(gone("prefill-1", "lost"), worker("decode-1"), keys=(BAD,)),
        "The prefill pool is gone: decode workers compute prompts", "pools",
    ),
    "the only prefill worker stopped": (
        seen(gone("prefill-1", "silent", "it is connected and does not answer"),
             worker("decode-1")),
        "The prefill pool is gone: decode workers compute prompts", "pools",
    ),
    "prefill workers that decode workers cannot reach": (
        seen(worker("prefill-1"), worker("decode-1", prefill_unreachable=True)),
        "decode-1 reaches no prefill worker", "pools",
    ),
    "one of two decode workers stopped": (
        seen(worker("prefill-1"), worker("decode-1"), gone("decode-2", "lost"), keys=(BAD,)),
        "decode-2 is lost", "workers",
    ),
    "a worker with another model": (
        seen(*FLEET, gone("decode-3", "other_model", "it serves 'b', and this fleet 'a'")),
        "decode-3 is not used", "workers",
    ),
    "a worker with another secret": (
        seen(*FLEET, gone("decode-3", "other_secret", "its BATON_CLUSTER_SECRET is another")),
        "decode-3 is refused", "workers",
    ),
    "a worker at an address that routers cannot reach": (
        seen(*FLEET, gone("decode-3", "address", "it is registered at tcp://10.9.9.9:7000")),
        "decode-3 is not connected", "workers",
    ),
    "a worker that starts without an end": (
        seen(*FLEET, worker("decode-3", condition="starting", reason="it loads its weights",
                            since_us=NOW_US - 45 * 60 * 10**6)),
        "decode-3 is starting", "workers",
    ),
    "few blocks": (
        seen(worker("prefill-1"), worker("decode-1"), worker("decode-2", blocks_total=40),
             keys=(BAD,)),
        "decode-2 has too few KV blocks", "few_blocks",
    ),
    "the store killed": (seen(store=STORE), "The store does not answer", "store"),
    "a router killed": (seen(routers=ROUTERS), "router-b (host, pid 7) has fallen silent",
                        "routers"),
    "a tier on a full disk": (
        seen(tiers=(TierFacts(worker_id="decode-1", tier="disk", failures=4, since_us=SINCE_US),)),
        "Blocks below the KV pool of decode-1 (disk) fail", "tiers",
    ),
    "a decode worker with another transport": (
        seen(apart=(APART,)),
        "1 pair of 2 cannot hand over", "pools",
    ),
    "pools with different transports": (
        seen(apart=(APART, msgspec.structs.replace(APART, decode="decode-2"))),
        "No prefill worker can hand over to a decode worker", "pools",
    ),
    "a log on a full disk": (
        seen(logs=(LogFacts(process="decode-1", lost=12, since_us=SINCE_US),)),
        "The log of decode-1 cannot be written", "logs",
    ),
    "clients that name another model": (
        seen(keys=(KeyFacts(name="app", accepted=2, ended=2, good=2, invalid=80), GOOD)),
        "Most requests of key app are invalid", "invalid",
    ),
    "clients without keys that name another model": (
        seen(keys=(KeyFacts(invalid=80),)), "Most requests are invalid", "invalid",
    ),
    "a router without the CPU that it needs": (
        seen(keys=(BAD,), loop=LoopFacts(lag_ms=41.0, worst_ms=90.0)),
        "The router is slow: its event loop runs 41.0\u00a0ms late", "router",
    ),
    "a starved host": (
        seen(keys=(BAD,), hosts=(STARVED,), short=(Role.PREFILL,), pressure_prefill=1.4),
        "host-7 is starved of CPU", "hosts",
    ),
    "a CPU limit": (
        seen(keys=(BAD,), hosts=(msgspec.structs.replace(STARVED, waiting_share=0.0,
                                                         throttled_share=0.6),)),
        "host-7 is starved of CPU", "hosts",
    ),
    "a flooding key": (seen(keys=FLOOD), "Key batch sends more than it may", "flood"),
    "no known cause": (seen(keys=(BAD,)), "82\u00a0% of requests meet their targets", "missed"),
    "refusals without a known cause": (
        seen(keys=(KeyFacts(accepted=10, refused=90, ended=10, good=10),)),
        "10\u00a0% of requests meet their targets", "missed",
    ),
}  # fmt: skip
"""Facts, the headline, and the rule whose finding comes first."""
