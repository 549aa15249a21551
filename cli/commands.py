"""The commands of `baton`: a summary of each, and the modules of its main and its settings.

Modules are named, not imported, so that a router process does not load a worker's torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Main = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Command:
    """One subcommand; `main` and `settings` are `module:name`."""

    name: str
    summary: str
    main: str
    settings: str

    def load_main(self) -> Main:
        """The function that runs the command with the arguments after its name."""
        found: Main = _load(self.main)
        return found

    def load_settings_class(self) -> type:
        """The command's settings dataclass; cheap to import."""
        found: type = _load(self.settings)
        return found


COMMANDS = {
    command.name: command
    for command in (
        Command(
            "up",
            "start a whole fleet on this host: router, workers, and a Valkey if none is named",
            "cli.up:main",
            "cli.up_settings:UpSettings",
        ),
        Command(
            "router",
            "serve the HTTP API and place requests on workers",
            "router_process.main:main",
            "router_process.settings:RouterSettings",
        ),
        Command(
            "prefill",
            "compute prompts and stream their KV blocks to decode workers",
            "prefill_worker.main:main",
            "prefill_worker.settings:PrefillSettings",
        ),
        Command(
            "decode",
            "generate tokens from prefilled or local prompts",
            "decode_worker.main:main",
            "decode_worker.settings:DecodeSettings",
        ),
        Command(
            "status",
            "show the workers of a fleet and their load",
            "cli.status:main",
            "cli.status:StatusSettings",
        ),
        Command(
            "chat",
            "converse with a fleet in the terminal, or ask it one question",
            "cli.chat.main:main",
            "cli.chat.settings:ChatSettings",
        ),
        Command(
            "doctor",
            "say what is wrong with a fleet, by which evidence, and what to change",
            "cli.doctor:main",
            "cli.doctor:DoctorSettings",
        ),
        Command(
            "trace",
            "show where one request's time went, and write it as a file for Perfetto",
            "cli.trace:main",
            "cli.trace:TraceSettings",
        ),
        Command(
            "simulate",
            "run recorded or made-up traffic through a fleet in virtual time, without GPUs",
            "simulator.commands.simulate:main",
            "simulator.commands.settings:SimulateSettings",
        ),
        Command(
            "plan",
            "find the fleet of --gpus cards that serves traffic best, and whether to split at all",
            "simulator.commands.plan:main",
            "simulator.commands.settings:PlanSettings",
        ),
        Command(
            "tune",
            "find the settings that would have served recorded traffic best; changes nothing",
            "simulator.commands.tune:main",
            "simulator.commands.settings:TuneSettings",
        ),
        Command(
            "keys",
            "make a key of the HTTP API, and its hash for the router's key file",
            "cli.keys:main",
            "cli.keys:KeysSettings",
        ),
        Command(
            "drain",
            "take a worker out of its fleet: it finishes what it has, and ends",
            "cli.drain:main",
            "cli.drain:DrainSettings",
        ),
        Command(
            "bench",
            "measure: engines, routers, transports and fleets, side by side",
            "cli.bench:main",
            "cli.bench:BenchSettings",
        ),
        Command(
            "quantize",
            "write a model with weights in 4 and 5 bits, rounded for a text that it reads",
            "cli.quantize:main",
            "cli.quantize:QuantizeSettings",
        ),
        Command(
            "build-kernels",
            "compile the CPU kernels ahead, for images that have no compiler",
            "cli.build_kernels:main",
            "cli.build_kernels:BuildKernelsSettings",
        ),
        Command(
            "check",
            "send one chat to a fleet and report which workers served it",
            "cli.pods.check:main",
            "cli.pods.check:CheckSettings",
        ),
        Command(
            "fetch",
            "download a model before workers need it",
            "cli.pods.fetch:main",
            "cli.pods.fetch:FetchSettings",
        ),
        Command(
            "store",
            "run the Valkey that comes with Baton, for a fleet on several hosts",
            "cli.pods.store:main",
            "cli.pods.store_settings:StoreSettings",
        ),
        Command(
            "preflight",
            "check hosts, and move blocks between them, before workers run there",
            "cli.pods.preflight.main:main",
            "cli.pods.preflight.settings:PreflightSettings",
        ),
        Command(
            "kube-secret",
            "make a fleet's secrets in a Kubernetes Secret, where they are missing",
            "cli.pods.kube_secret:main",
            "cli.pods.kube_secret:KubeSecretSettings",
        ),
    )
}


def settings_classes() -> list[type]:
    """The settings of every process, to tell another process's setting from an unknown name."""
    return [command.load_settings_class() for command in COMMANDS.values()]


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
