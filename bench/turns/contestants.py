"""The servers that are compared: fleets that place in different ways, one colocated worker, vLLM.

All of them serve the same checkpoint on the same cores. Knows command lines, no conversations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from bench.engine.server_process import BLOCK_SIZE, HOST, ServerCommand, vllm_command
from bench.engine.workloads import EngineNeeds
from process.settings.spec import specs_of
from process.version import baton_version
from router_process.settings import RouterSettings

FETCH = "kv_fetch"
"""The router's setting that lets workers fetch blocks from each other: `on` or `off`."""
NO_FETCHING = "this version has no fetching"
_NUM_PREFILL, _NUM_DECODE = 1, 2
_VLLM_BLOCK = 32
"""The smallest block of vLLM's attention on every CPU."""
_FOR_EVER = "86400"
_PLACEMENTS: dict[str, dict[str, str]] = {"affinity": {}, "load": {"placement": "load"}}
"""Ways to place requests, with the settings of each."""


@dataclass(frozen=True)
class Contestant:
    """A server to start. `missing` says why it cannot be, in which case there is no `command`.
    `without` names the contestant that differs only by not fetching. On CPUs without bf16, vLLM
    0.32 fails if a request has a seed, so it gets none."""

    name: str
    command: ServerCommand | None = None
    missing: str = ""
    block_size: int = BLOCK_SIZE
    without: str = ""
    takes_seeds: bool = True


def contestants(needs: EngineNeeds, vllm_python: str | None) -> Iterator[Contestant]:
    """All contestants; the first one is what the others are compared with. Raises BatonError if
    the interpreter has no vLLM."""
    yield Contestant("colocated", _baton(needs, 0, 1, needs.threads))
    can_fetch = FETCH in specs_of(RouterSettings)
    for placement in _PLACEMENTS:
        for fetches in (False, True):
            plain = f"by {placement}, no fetching"
            name = f"by {placement}, fetching" if fetches else plain
            if fetches and not can_fetch:
                yield Contestant(name, missing=NO_FETCHING)
                continue
            settings = dict(_PLACEMENTS[placement])
            if can_fetch:
                settings[FETCH] = "on" if fetches else "off"
            command = _baton(needs, _NUM_PREFILL, _NUM_DECODE, 1, settings)
            yield Contestant(name, command, without=plain if fetches else "")
    if vllm_python is not None:
        caching = ("--enable-prefix-caching", "--enable-prompt-tokens-details")
        command = vllm_command(needs, vllm_python, (*caching, f"--block-size={_VLLM_BLOCK}"))
        yield Contestant("vLLM", command, block_size=_VLLM_BLOCK, takes_seeds=False)


def _baton(
    needs: EngineNeeds,
    num_prefill: int,
    num_decode: int,
    threads: int,
    settings: dict[str, str] | None = None,
) -> ServerCommand:
    """`baton up` with pools that hold everything. Processes are stopped for minutes, so leases and
    silence last for ever."""
    flags = (
        f"--model={needs.folder}",
        f"--served-model-name={needs.folder.name}",
        f"--prefill={num_prefill}",
        f"--decode={num_decode}",
        "--device=cpu",
        f"--dtype={needs.dtype}",
        f"--torch-threads={threads}",
        f"--block-size={BLOCK_SIZE}",
        f"--num-blocks={needs.num_tokens // BLOCK_SIZE + 1}",
        f"--max-batch-size={needs.max_sequences}",
        f"--host={HOST}",
    )
    patience = dict.fromkeys(("lease_s", "peer_silence_s", "silence_s"), _FOR_EVER)
    given = {**patience, **(settings or {})}
    environment = {f"BATON_{name.upper()}": value for name, value in given.items()}
    command = (sys.executable, "-m", "cli.main", "up", *flags)
    return ServerCommand("baton", f"Baton {baton_version()}", command, environment)
