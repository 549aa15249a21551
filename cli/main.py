"""`baton`: dispatches to a subcommand and turns its errors into one line and an exit code.

The exit code is 2 for a wrong command, setting or checkpoint, 1 if the command failed, and 130
after an interrupt; `cli.__main__` has that after SIGTERM.
"""

from __future__ import annotations

import difflib
import os
import select
import sys
from collections.abc import Sequence

from cli.commands import COMMANDS, Command, settings_classes
from cli.output.terminal_text import shown
from process.openmp import prepare_openmp
from process.settings import other_settings
from process.version import baton_version
from protocol.errors import BatonError, ConfigError, ModelLoadError

_HELP = ("help", "-h", "--help")
_VERSION = ("version", "-V", "--version")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    try:
        status = _dispatch(list(sys.argv[1:] if argv is None else argv))
    except OSError as error:
        is_read = not isinstance(error, BrokenPipeError) or _has_reader()
        if _is_output_taken("\n") and is_read:  # then another file or pipe failed
            raise
        return 1
    return status if _is_output_taken() else status or 1


def _has_reader() -> bool:
    """False if standard output is a pipe that nobody reads."""
    if sys.stdout is None:  # it was closed when we started
        return True
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def _is_output_taken(last: str = "") -> bool:
    """Write `last`, and flush standard output; returns whether that worked. On failure the rest of
    the output is dropped; only a reader that went away, such as `head`, is not reported."""
    if sys.stdout is None:  # it was closed when we started, so nothing was printed
        return True
    try:
        sys.stdout.write(last)
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"baton: cannot write to standard output: {error.strerror}", file=sys.stderr)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # else the interpreter tries again as it ends
        os.close(nowhere)
        return False
    return True


def _dispatch(arguments: Sequence[str]) -> int:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("help", [])
    if name in _HELP and rest:
        name, rest = rest[0], ["--help"]
    if name in _HELP:
        print(overview())
        return 0
    if name in _VERSION:
        print(f"baton {baton_version()}")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"commands: {', '.join(COMMANDS)}"
        print(f"baton: {name!r} is not a command; {hint}", file=sys.stderr)
        return 2
    return _run(command, rest)


def overview() -> str:
    """The text that `baton help` prints."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {each.name:<{width}}  {each.summary}" for each in COMMANDS.values()]
    return "\n".join(
        [
            "usage: baton COMMAND [FLAGS]",
            "",
            "Serves large language models with prefill and decode on separate workers.",
            "",
            *lines,
            "",
            "Every setting can be given by flag, by BATON_ variable, or in a TOML file named by",
            "--config; `baton help COMMAND` explains those of a command.",
        ]
    )


def _run(command: Command, argv: Sequence[str]) -> int:
    prepare_openmp()
    try:
        with other_settings(settings_classes()):
            return command.load_main()(argv)
    except BatonError as error:
        print(f"baton {command.name}: {shown(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, ModelLoadError)) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
