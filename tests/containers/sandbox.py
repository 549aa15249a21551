"""Parts of a container for tests: control groups with a memory limit, and namespaces.

Both need root and a system that permits them; `needs_...` skip a test elsewhere and say why.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.paths import ROOT

_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
_MEMORY = Path("/sys/fs/cgroup/memory")  # version 1
_UNIFIED = Path("/sys/fs/cgroup")  # version 2


def python(code: str) -> list[str]:
    """A command that runs `code` with Baton's packages."""
    return [sys.executable, "-c", code]


def baton(*arguments: str) -> list[str]:
    """A command line of Baton."""
    return [sys.executable, "-P", "-m", "cli", *arguments]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a command in a sandbox. It has only what the command needs."""
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **extra}


def in_namespaces(command: Sequence[str], setup: str = ":", network: bool = True) -> list[str]:
    """A command that runs `command` as PID 1 of a pid namespace, in mount and, with `network`,
    network namespaces of its own, after the shell commands of `setup`."""
    flags = [*_UNSHARE, *(["--net"] if network else [])]
    return [*flags, "sh", "-ec", f'{setup}\nexec "$@"', "sh", *command]


def as_a_pod(*needed: Path) -> list[str]:
    """A prefix that runs a command without capabilities, as user 1001 if that user can read what is
    `needed`, else as root."""
    bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    user = [*bare, "--reuid=1001", "--regid=1001", "--clear-groups"]
    test = 'for path; do test -r "$path" || exit 1; done'
    paths = [str(each) for each in (Path(sys.executable), *needed)]
    done = subprocess.run([*user, "sh", "-c", test, "sh", *paths], capture_output=True, timeout=120)
    return bare if done.returncode else user


def _why_no_namespaces() -> str:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces without a user namespace need root on Linux"
    if not all(map(shutil.which, ("unshare", "setpriv", "ip"))):
        return "unshare, setpriv and ip (util-linux, iproute2) are not all here"
    done = subprocess.run(in_namespaces(["true"]), capture_output=True, text=True, timeout=120)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else ""


def needs_namespaces() -> pytest.MarkDecorator:
    """Skips where a test cannot make namespaces."""
    reason = _why_no_namespaces()
    return pytest.mark.skipif(bool(reason), reason=reason or "namespaces")


def _own_group() -> tuple[Path, str] | None:
    """The folder of this process's memory group and the name of its limit, if we may make one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return _MEMORY / path.lstrip("/"), "memory.limit_in_bytes"
        if controllers == "" and (_UNIFIED / "cgroup.controllers").exists():
            return _UNIFIED / path.lstrip("/"), "memory.max"
    return None


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group with this limit below our own; skips the test where there is none. Put a
    process into it by writing its pid to `cgroup.procs`."""
    found = _own_group() if sys.platform == "linux" else None
    if found is None:
        pytest.skip("no memory controller of control groups here")
    folder = found[0] / f"baton-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / found[1]).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no memory limit can be set here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


def in_group(folder: Path, command: Sequence[str]) -> list[str]:
    """A command that runs `command` in a control group."""
    return ["sh", "-ec", f'echo $$ > {folder}/cgroup.procs\nexec "$@"', "sh", *command]
