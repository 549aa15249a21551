"""Mooncake (Qin et al., FAST 2025): how requests are placed, and what a common cache gives.

The paper describes its experiment on scheduling: 8 prefill and 8 decode workers of eight A800 each,
a model of the shape of Llama 2 70B, and the kind of traffic. It does not say how dense the traffic
was. So the density is chosen such that one policy, load balancing, has its published TTFT, and the
other policies are compared. For the caches, the paper gives the size of a node's cache, three
million tokens, but not the number of nodes; with four nodes, both published ratios result.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.published.results import Result, Row
from protocol.messages import Role
from router.routing.decision import decide
from router.routing.placement import PlacementQuery
from scheduling.scheduler import SchedulerConfig
from scheduling.step_model import attended_pairs
from simulator.devices.cards import CARDS
from simulator.devices.model_shape import model_shape
from simulator.devices.roofline import Roofline
from simulator.fleet import Fleet, FleetSpec
from simulator.policies.choices import Policy, by_rule
from simulator.policies.pools import PoolLoad, at_random, least_loaded, missing_tokens
from simulator.traces.files import TraceOptions, read_trace
from simulator.traces.sessions import Trace
from simulator.worker_spec import WorkerSpec

_CARDS, _WORKERS, _BLOCK = 8, 8, 128
_REQUESTS = 2000
_BALANCED_S = 5.27
_NODES, _NODE_TOKENS, _HASH_TOKENS = 4, 3_000_000, 512


def local_cache_aware(
    query: PlacementQuery, loads: Sequence[PoolLoad], rng: random.Random
) -> PoolLoad:
    """The earliest first token, by queues and by what each worker has cached."""

    def first_token_ms(load: PoolLoad) -> float:
        missing = missing_tokens(query, load)
        attended = attended_pairs(missing, query.num_tokens - missing)
        return load.pace.wait_ms + load.pace.prompt_ms(missing, attended)[0]

    return min(loads, key=lambda load: (first_token_ms(load), load.worker_id))


def ttft_by_policy(traces: Path) -> Result:
    """Mean time to the first token under each policy."""
    trace = read_trace(str(traces / "mooncake_conversation.jsonl"), TraceOptions(limit=_REQUESTS))
    balanced: Policy = by_rule(least_loaded)
    speed = _speed_of(trace, balanced)
    found = partial(_mean_ttft_s, trace.faster(speed))
    rows = [
        Row("random", 19.65, found(by_rule(at_random))),
        Row("load balancing", _BALANCED_S, found(balanced), f"sets the speed: {speed:.2f}"),
        Row("local cache", 3.58, found(by_rule(local_cache_aware))),
        Row("global cache", 3.07, found(decide), "ours: Baton, which moves no cached blocks here"),
    ]
    return Result("Mooncake: mean TTFT by policy", " s", rows, "load balancing")


def _speed_of(trace: Trace, policy: Policy) -> float:
    """The speed of the trace at which this policy has the published TTFT."""
    low, high = 0.5, 8.0
    for _ in range(6):
        middle = (low * high) ** 0.5
        if _mean_ttft_s(trace.faster(middle), policy) < _BALANCED_S:
            low = middle
        else:
            high = middle
    return low


def _mean_ttft_s(trace: Trace, policy: Policy) -> float:
    card, shape = CARDS["A800"], model_shape("Llama-3-70B")
    times = Roofline(card, shape, _CARDS)
    config = SchedulerConfig(_BLOCK, max_batch_size=256, chunk_min_tokens=_BLOCK,
                             chunk_max_tokens=8192)  # fmt: skip
    num_blocks = times.pool_blocks(_BLOCK)
    block_bytes = times.kv_bytes_per_token * _BLOCK
    pools = tuple(
        (
            WorkerSpec(role, config, num_blocks, block_bytes, shape.max_positions, times, _CARDS),
            _WORKERS,
        )
        for role in (Role.PREFILL, Role.DECODE)
    )
    spec = FleetSpec(pools, lambda: policy, card.network_bytes_per_s * _CARDS)
    served = [each for each in Fleet(spec, 0).run(trace).requests if not each.failure]
    return sum(each.ttft_s for each in served) / len(served)


def hits_of_a_common_cache(traces: Path) -> Result:
    """Hit rates of one cache that all nodes share, divided by those of separate caches."""
    rows = []
    for name, theirs in (("conversation", 2.22), ("synthetic", 2.36)):
        path = traces / f"mooncake_{name}.jsonl"
        prompts = [
            [block for first, count in turn.blocks.runs for block in range(first, first + count)]
            for session in read_trace(str(path), TraceOptions()).sessions
            for turn in session.turns
            if turn.blocks is not None
        ]
        one = hit_share(prompts, 1, _NODES * _NODE_TOKENS // _HASH_TOKENS)
        own = hit_share(prompts, _NODES, _NODE_TOKENS // _HASH_TOKENS)
        rows.append(Row(name, theirs, one / own, f"{own:.1%} of blocks, then {one:.1%}"))
    title = f"Mooncake: hits of a common cache, by those of {_NODES} nodes' own"
    return Result(title, "x", rows)


def hit_share(prompts: Sequence[Sequence[int]], num_nodes: int, capacity: int) -> float:
    """The share of blocks that are found in LRU caches. Requests go to nodes in turn, whatever
    their caches hold."""
    nodes: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_nodes)]
    hits = blocks = 0
    for number, prompt in enumerate(prompts):
        cache = nodes[number % num_nodes]
        is_prefix = True
        for block in prompt:
            is_prefix = is_prefix and block in cache
            hits += is_prefix
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
        blocks += len(prompt)
    return hits / blocks
