"""`baton up`: starts a fleet, shows where it runs, supervises it, stops it at Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TextIO, cast

from rich.console import Console

from checkpoint.model_source import commit_of, model_name, resolve_model
from cli.child_settings import ChildSettings
from cli.fleet import Fleet
from cli.output.json_output import JsonOutput
from cli.output.lossy_text import LossyText
from cli.output.tables import print_workers
from cli.output.terminal_text import plain_console
from cli.up_settings import TO_STDOUT, UpSettings
from process.cores import ranges_of, usable_cores
from process.logs import setup_logs
from process.settings import (
    config_path_of,
    flags_given,
    settings_or_exit,
    warn_of_unknown_variables,
)
from protocol.error_line import one_line
from protocol.errors import BatonError, ConfigError, ModelLoadError
from router.fleet.worker import registered

WATCH_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Run a fleet until a signal comes. Returns the exit status: 0, 1 if the fleet failed, 2 if a
    setting is wrong."""
    settings = settings_or_exit(
        UpSettings,
        argv,
        prog="baton up",
        description="Start a router, workers and, unless one is named, a Valkey on this host.",
    )
    output = JsonOutput(sys.stdout) if settings.log_to == TO_STDOUT else None
    console = console_on(output)
    if output is not None:
        setup_logs(settings.log_level, "json", "up", output.stream_of("up"))
    warn_of_unknown_variables(UpSettings)
    try:
        asked, settings = settings.model, with_local_model(settings)
        commit = commit_of(settings.model)
        if commit is not None:
            console.print(f"{asked} is commit {commit}")
        child_settings = ChildSettings(
            settings,
            flags_given(UpSettings, argv) | {"model", "revision", "served_model_name"},
            config_path=config_path_of(argv, os.environ),
        )
        take_line = None if output is None else output.write_line
        run_fleet(Fleet(settings, child_settings, console.print, take_line), console)
    except BatonError as error:
        is_wrong = isinstance(error, (ConfigError, ModelLoadError))
        line = one_line(error) if is_wrong else str(error)
        print(f"baton up: {line}", file=sys.stderr if output is None else console.file)
        return 2 if is_wrong else 1
    return 0


def console_on(output: JsonOutput | None) -> Console:
    """The console for the progress of `baton up`: the terminal, or lines of JSON. The fleet runs on
    even if the output cannot be written, as on a full disk."""
    if output is None:
        return plain_console(file=cast(TextIO, LossyText(sys.stdout)))
    stream = output.stream_of("up")
    return Console(
        file=cast(TextIO, stream), highlight=False, markup=False, soft_wrap=True, no_color=True
    )


def with_local_model(settings: UpSettings) -> UpSettings:
    """The settings with the model's local folder, fetched once for all processes. Raises
    ConfigError and ModelLoadError."""
    return replace(
        settings,
        model=str(resolve_model(settings.model, settings.revision).resolve()),
        revision=None,
        served_model_name=settings.served_model_name or (model_name(settings.model),),
    )


def run_fleet(
    fleet: Fleet, console: Console, while_serving: Callable[[Fleet], bool] | None = None
) -> None:
    """Start, show and watch a fleet until a signal comes; then stop it. Raises as Fleet.start.

    `while_serving` is called once the fleet serves; if it returns False, the fleet stops at once.
    """
    with stop_by_signal(fleet):
        try:
            announce_start(fleet, console)
            fleet.start()
            show(fleet, console)
            if while_serving is None or while_serving(fleet):
                console.print("Ctrl-C stops everything.")
                watch(fleet, console)
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):  # the terminal may be closed
                console.print("stopping ...")
        finally:
            try:
                fleet.stop()
            except KeyboardInterrupt:  # the first signal came while the fleet was stopping
                fleet.stop()


def announce_start(fleet: Fleet, console: Console) -> None:
    """Print which workers are about to start, and the threads and cores that each one gets."""
    settings = fleet.settings
    children = ChildSettings(settings)
    shares = "; ".join(",".join(ranges_of(share)) for share in children.core_shares)
    console.print(
        f"starting {settings.prefill} prefill and {settings.decode} decode workers for "
        f"{next(iter(settings.served_model_name), settings.model)}: "
        f"{children.torch_threads} threads each on {len(usable_cores())} cores"
        + (f", each kept to its own ({shares})" if shares else "")
    )


def show(fleet: Fleet, console: Console) -> None:
    """Print the workers, the router and its dashboard, Valkey and the log folder."""
    valkey = fleet.valkey
    console.print()
    rows = [registered(info) for info in fleet.workers.values()]
    print_workers(console, rows, with_load=False)
    console.print()
    console.print(f"router   {fleet.url}/v1  (pid {fleet.processes['router'].pid})")
    console.print(f"page     {fleet.url}/dashboard/")
    if valkey is not None:
        console.print(f"valkey   127.0.0.1:{valkey.port}  (pid {valkey.pid}, embedded)")
    to_stdout = fleet.settings.log_to == TO_STDOUT
    console.print(f"logs     {'standard output' if to_stdout else fleet.log_dir}")
    console.print()


def watch(fleet: Fleet, console: Console) -> None:
    """Report processes that end and restart them, until KeyboardInterrupt."""
    while True:
        for line in fleet.check():
            console.print(line)
        time.sleep(WATCH_S)


@contextmanager
def stop_by_signal(fleet: Fleet) -> Iterator[None]:
    """A context in which the first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt, and a
    further SIGINT or SIGTERM kills the fleet.

    A terminal that closes may send SIGHUP more than once. SIGHUP stays ignored where it was, as
    under `nohup`.
    """
    is_stopping = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        if not is_stopping:
            is_stopping = True
            raise KeyboardInterrupt
        if number != signal.SIGHUP:
            fleet.kill()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    former = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
