"""The cases: planted faults with what the console should say, and healthy loads.

Some faults are of kinds that operators of other servers have reported in public: workers whose KV
layouts differ (vLLM issue 42895), a worker that hangs while it looks alive (vLLM issue 39863), a
worker that crashes again and again, a router that gets too little CPU under load (vLLM
production-stack issue 448), clients of whom every request is refused because of what they name
(vLLM production-stack pull request 643), and transfers of KV that fail, so that prompts are
computed again unnoticed (vLLM issue 32200).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.admission.api_keys import make_key
from http_kit.tenant import KeyTerms
from tests.diagnosis import faults, unsendable
from tests.diagnosis.faults import Plant, nothing
from tests.diagnosis.judge import JUDGEMENT_S, Expected
from tests.diagnosis.load import Load
from tests.diagnosis.scene import Beside

CFS_PERIOD_S = 0.1
"""Of Linux's limit of CPU time: in each period, a process runs until its share is used."""
CONTENT = {"BATON_TTFT_TARGET_MS": "30000", "BATON_TPOT_TARGET_MS": "5000"}
"""Targets that a starved machine meets, too: what is found then is a fact."""
STRICT = {"BATON_TTFT_TARGET_MS": "120", "BATON_TPOT_TARGET_MS": "15"}
LONG_LEASE = {"BATON_LEASE_S": "120"}
CALM = Load()
BATCH, CHAT = make_key(), make_key()
ROUTER = Beside("router-2", "router", {"BATON_CLUSTER": "default"})

ALERTS = {
    "workers": "BatonWorkersUnusable", "pools": "BatonWorkersUnusable",
    "routers": "BatonRouterDown",
}  # fmt: skip
"""What fires for the facts that a rule of the doctor finds, unless a case names another alert."""


@dataclass(frozen=True)
class Case:
    """A fleet, its load, the planted fault, and the right diagnosis. The load runs for `warm_up_s`
    before the fault is planted. `keys` are the API keys of the clients."""

    name: str
    expected: Expected
    plant: Plant = nothing
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: CONTENT)
    loads: Sequence[Load] = (CALM,)
    beside: Sequence[Beside] = ()
    warm_up_s: float = 6.0
    keys: Sequence[tuple[str, KeyTerms]] = ()


def _fact(headline: str, rule: str, alert: str | None = None, **more: Any) -> Expected:
    alert = alert or ALERTS.get(rule)
    return Expected(headline=headline, rule=rule, title=headline, alert=alert, **more)


def _judged(
    headline: str, rule: str, title: str, alert: str | None = None, **more: Any
) -> Expected:
    return Expected(headline, rule, title, alert, JUDGEMENT_S, **more)


TWO = {"prefill": 1, "decode": 2}
ONE = {"prefill": 1, "decode": 1}

FAULTS = (
    Case(
        "decode_places",
        _fact("Decode is short", "pool_balance", "BatonDecodeShort", tolerated=("targets",)),
        settings=ONE | {"max_batch_size": 4},
        environment={"BATON_TTFT_TARGET_MS": "1000", "BATON_TPOT_TARGET_MS": "5000"},
        loads=(Load(num_clients=40, prompts=(40,), outputs=(400,), prefix=0, pause_s=0.0),),
        warm_up_s=0.0,
    ),
    Case("decode_killed",
         _fact("No decode worker is left", "pools", "BatonNoDecodeWorker", tolerated=("faults",)),
         faults.killed("decode-1", "decode-2"), TWO),
    Case("decode_stopped",
         _fact("No decode worker is left", "pools", "BatonNoDecodeWorker", tolerated=("faults",)),
         faults.stopped("decode-1"), ONE),
    Case("prefill_killed", _fact("The prefill pool is gone", "pools", tolerated=("faults",)),
         faults.killed("prefill-1"), ONE),
    Case("prefill_stopped", _fact("The prefill pool is gone", "pools", tolerated=("faults",)),
         faults.stopped("prefill-1"), ONE),
    Case("one_decode_killed", _fact("decode-2 is lost", "workers", tolerated=("faults",),
                                    at_fault=("decode-2",)), faults.killed("decode-2"), TWO),
    Case("one_decode_stopped", _fact("decode-2 is lost", "workers", tolerated=("faults",),
                                     at_fault=("decode-2",)), faults.stopped("decode-2"), TWO),
    Case("one_prefill_killed", _fact("prefill-2 is lost", "workers", tolerated=("faults",),
                                     at_fault=("prefill-2",)),
         faults.killed("prefill-2"), {"prefill": 2, "decode": 1}),
    Case("hung_but_registered",
         _fact("decode-2 is (silent|lost|not connected)", "workers", tolerated=("faults",),
               within_s=14.0, at_fault=("decode-2",)),
         faults.stopped("decode-2"), TWO, CONTENT | LONG_LEASE),
    Case("other_model", _fact("decode-x is not used", "workers"),
         faults.joined_with_another_model("decode-x"), ONE),
    Case("other_layout", _fact("decode-x is not used", "workers"),
         faults.joined(Beside("decode-x", "decode", {"BATON_BLOCK_SIZE": "32"})), ONE),
    Case("other_secret", _fact("decode-x is refused", "workers"),
         faults.joined(Beside("decode-x", "decode", secret="a secret of strangers, and long")),
         ONE),
    Case("unreachable_address", _fact("decode-x is not connected", "workers", within_s=12.0),
         faults.joined(Beside("decode-x", "decode",
                              {"BATON_ADVERTISE_ADDRESS": "192.0.2.77"})), ONE),
    Case("few_blocks", _fact("decode-x has too few KV blocks", "few_blocks",
                             at_fault=("decode-x",)),
         faults.joined(Beside("decode-x", "decode", {"BATON_NUM_BLOCKS": "40",
                                                     "BATON_MAX_CONTEXT": "512"})), ONE),
    Case("ucx_tls",
         Expected("", "slow_link",
                  "UCX_TLS of decode-x forbids CMA", "BatonPairsSlow", JUDGEMENT_S,
                  at_fault=("decode-x",)),
         faults.joined(Beside("decode-x", "decode", {"UCX_TLS": "tcp",
                                                     "BATON_TRANSPORT": "nixl"})),
         ONE | {"transport": "nixl"}, loads=(Load(num_clients=3, prefix=0),)),
    Case("flooding_key",
         _fact("Key batch sends more than it may", "flood", "BatonKeyFloods"),
         faults.more_load(Load(num_clients=12, pause_s=0.2, key=BATCH)), ONE,
         loads=(Load(key=CHAT),), keys=((BATCH, KeyTerms("batch", inflight=2)),
                                        (CHAT, KeyTerms("chat")))),
    Case("invalid_requests",
         _fact("Most requests are invalid", "invalid", "BatonRequestsInvalid"),
         faults.more_load(Load(num_clients=8, pause_s=0.2, model="llama-of-yesterday")), ONE),
    Case("log_disk_full",
         _fact("The log of router cannot be written", "logs", "BatonLogsLost"),
         faults.log_disk_full("router", faults.joined(Beside("decode-x", "decode"))), ONE),
    Case("router_slow",
         _fact("The router is slow", "router", "BatonGoodputLow", within_s=20.0),
         faults.throttled("router", still_s=CFS_PERIOD_S * 0.9), ONE, STRICT),
    Case("store_killed", _fact("The store does not answer", "store", "BatonStoreUnreachable"),
         faults.store_killed, ONE),
    Case("store_paused", _fact("The store does not answer", "store", "BatonStoreUnreachable"),
         faults.store_paused, ONE),
    Case("router_killed", _fact("router-.* has fallen silent", "routers"),
         faults.killed("router-2"), ONE, beside=(ROUTER,)),
    Case("router_hung", _fact("router-.* has fallen silent", "routers"),
         faults.stopped("router-2"), ONE, beside=(ROUTER,)),
    Case("starved_host", _judged("is starved of CPU", "hosts", "is starved of CPU",
                                 "BatonGoodputLow"),
         faults.starved, ONE, STRICT),
    Case("prefill_short",
         _judged("Prefill is short", "pool_balance", "Prefill is short", "BatonPrefillShort",
                 tolerated=("targets",)),
         faults.more_load(Load(num_clients=48, prompts=(600, 800), outputs=(4,), num_prefixes=64,
                               prefix=0, pause_s=0.0)),
         TWO | {"chunk_max_tokens": 64},
         {"BATON_TTFT_TARGET_MS": "250", "BATON_TPOT_TARGET_MS": "5000"}),
    Case("memory_full",
         _judged("", "memory_full", "Decode is out of KV memory", "BatonDecodeShort",
                 tolerated=("cache_thrash",)),
         settings=ONE | {"num_blocks": 56, "max_context": 512},
         loads=(Load(num_clients=12, prompts=(200, 240), outputs=(120,), prefix=0, pause_s=0.0),)),
    Case("slow_worker",
         _judged("", "slow_worker", "decode-1 is slower", at_fault=("decode-1",)),
         faults.throttled("decode-1"), {"prefill": 1, "decode": 3}, loads=(Load(num_clients=4),)),
    Case("crash_loop",
         _judged("", "faults", "decode-1 keeps ending", tolerated=("workers",),
                 at_fault=("decode-1",)),
         faults.killed_again_and_again("decode-1"), TWO | {"restart": True},
         loads=(Load(num_clients=3),)),
    Case("transfers_fail",
         _judged("", "faults", "Attempts with prefill-x fail", "BatonRequestsRepeated",
                 at_fault=("prefill-x",)),
         faults.joined(Beside("prefill-x", "prefill", module=unsendable.__name__)), ONE,
         loads=(Load(num_clients=4, prefix=0),)),
    Case("targets_out_of_reach",
         _judged("", "targets", "The targets are out of reach", "BatonGoodputLow",
                 tolerated=("decode_slow",)),
         settings=ONE, environment=CONTENT | {"BATON_TPOT_TARGET_MS": "0.1"}),
    Case("stalls",
         _judged("", "stalls", "Prompts on decode workers hold up streams"),
         settings={"prefill": 0, "decode": 1, "chunk_max_tokens": 256, "itl_target_ms": 1000.0},
         environment={"BATON_TPOT_TARGET_MS": "8"},
         loads=(Load(num_clients=6, prompts=(20, 900), outputs=(30,), prefix=0,
                     num_prefixes=99),)),
    Case("cache_thrash",
         _judged("", "cache_thrash", "too small"),
         settings={"prefill": 0, "decode": 1, "num_blocks": 330, "max_context": 1024},
         loads=(Load(num_clients=1, prompts=(420,), outputs=(2,), num_prefixes=18,
                     prefix=400),)),
)  # fmt: skip

_NOTHING = Expected(within_s=30.0)
HEALTHY = (
    Case("idle", _NOTHING, settings=ONE, loads=()),
    Case("steady", _NOTHING, settings=TWO),
    Case("bursts", _NOTHING, settings=TWO, loads=(Load(num_clients=12, burst_s=5.0),)),
    Case("long_prompts", _NOTHING, settings=ONE,
         loads=(Load(prompts=(120, 1500), outputs=(8,), prefix=0),)),
    Case("agents_with_pauses", _NOTHING, settings=TWO,
         loads=(Load(num_clients=6, prompts=(400, 500, 600), prefix=384, pause_s=3.0),)),
    Case("rolling_restart", _NOTHING, faults.rolling_restart, ONE),
    Case("one_slow_client", _NOTHING, settings=ONE,
         loads=(CALM, Load(num_clients=1, outputs=(60,), read_pause_s=0.5))),
    Case("clients_that_leave", _NOTHING, settings=ONE,
         loads=(CALM, Load(num_clients=4, outputs=(60,), leaves_after=4))),
    Case("decode_only", _NOTHING, settings={"prefill": 0, "decode": 2}),
    Case("two_routers", _NOTHING, settings=ONE, beside=(ROUTER,)),
)  # fmt: skip
