"""`baton up`: starts a fleet, shows where it runs, supervises it, stops it at Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from rich.console import Console

from cli.child_settings import ChildSettings
from cli.fleet import Fleet
from cli.tables import print_workers
from cli.up_settings import UpSettings
from process.cores import ranges_of, usable_cores
from process.model_source import model_name, resolve_model
from process.settings import config_path_of, flags_given, settings_or_exit
from protocol.errors import BatonError, ConfigError, ModelLoadError
from router.fleet.worker import registered

WATCH_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Run a fleet until Ctrl-C or SIGTERM; returns 0, 1 if it failed, 2 if misconfigured."""
    settings = settings_or_exit(
        UpSettings,
        argv,
        prog="baton up",
        description="Start a router, workers and, unless one is named, a Valkey on this host.",
        section="up",
    )
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        settings = with_local_model(settings)
        child_settings = ChildSettings(
            settings,
            flags_given(UpSettings, argv) | {"model", "served_model_name"},
            config_path=config_path_of(argv, os.environ),
        )
        run_fleet(Fleet(settings, child_settings, console.print), console)
    except BatonError as error:
        print(f"baton up: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, ModelLoadError)) else 1
    return 0


def with_local_model(settings: UpSettings) -> UpSettings:
    """The settings with the model's local folder, fetched once for all processes. Raises
    ModelLoadError."""
    return replace(
        settings,
        model=str(resolve_model(settings.model).resolve()),
        served_model_name=settings.served_model_name or model_name(settings.model),
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
        f"{settings.served_model_name or settings.model}: "
        f"{children.torch_threads} threads each on {len(usable_cores())} cores"
        + (f", each kept to its own ({shares})" if shares else "")
    )


def show(fleet: Fleet, console: Console) -> None:
    """Print the workers, the router, Valkey and the log folder."""
    valkey = fleet.valkey
    console.print()
    rows = [registered(info) for info in fleet.workers.values()]
    print_workers(console, rows, with_load=False)
    console.print()
    console.print(f"router   {fleet.url}/v1  (pid {fleet.processes['router'].pid})")
    if valkey is not None:
        console.print(f"valkey   127.0.0.1:{valkey.port}  (pid {valkey.pid}, embedded)")
    console.print(f"logs     {fleet.log_dir}")
    console.print()


def watch(fleet: Fleet, console: Console) -> None:
    """Report processes that end and restart them, until KeyboardInterrupt."""
    while True:
        for line in fleet.check():
            console.print(line)
        time.sleep(WATCH_S)


@contextmanager
def stop_by_signal(fleet: Fleet) -> Iterator[None]:
    """A context in which the first SIGINT or SIGTERM raises KeyboardInterrupt, and a further one
    kills the fleet."""
    count = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            fleet.kill()
            return
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    former = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
