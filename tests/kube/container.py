"""One container as a process: own mounts, own process ids, the pod's network, and its user.

The file system is the host's, seen through an overlay that takes the container's writes, with the
pod's volumes on top. Signals go to the container's process 1, as a container runtime sends them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.kube.api import Json
from tests.paths import ROOT

KERNELS = "/opt/baton/kernels"
SHM_MIB = 64
"""Size of /dev/shm, as container runtimes give it."""


@dataclass(frozen=True)
class Mount:
    """A folder or file of the pod, and where the container sees it."""

    source: Path
    target: str
    is_read_only: bool


IMAGE_MOUNTS = (
    Mount(ROOT / "demo_model", "/opt/baton/demo_model", is_read_only=True),
    Mount(Path(os.environ.get("KUBE_KERNELS", "/var/empty")), KERNELS, is_read_only=True),
)
"""What the images hold beside the code."""


@dataclass
class ContainerSpec:
    """What a container runs, resolved: no references to other objects are left."""

    name: str
    argv: list[str]
    env: dict[str, str]
    mounts: list[Mount] = field(default_factory=list)
    working_dir: str = "/"
    security: Json = field(default_factory=dict)
    fs_group: int | None = None


class Container:
    """A running container; owns its processes and the folder of its overlay."""

    def __init__(self, spec: ContainerSpec, pause: int, hosts: Path, folder: Path) -> None:
        self.spec = spec
        self._inner: int | None = None
        for name in ("upper", "work", "root"):
            (folder / name).mkdir(parents=True)
        script = folder / "start.sh"
        script.write_text(_start_script(spec, folder, hosts))
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            ["nsenter", "-t", str(pause), "-n", "-i", "-u", "unshare", "--mount", "--pid", "--fork",
             "--kill-child", "bash", str(script)],
            env=spec.env, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.log_file = folder / "log"

    @property
    def exit_code(self) -> int | None:
        """Its exit code once it has ended; 128 + N after signal N."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to process 1 of the container."""
        inner = self._process_1()
        if inner is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(inner, number)

    def kill(self) -> None:
        """End everything in it."""
        self.signal(signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._log.close()

    def run(self, command: list[str], timeout_s: float) -> int:
        """Run a command inside, as `kubectl exec` does; returns its exit code, 124 in time-out."""
        inner = self._process_1()
        if inner is None:
            return 126
        inside = ["nsenter", "-t", str(inner), "-m", "-n", "-p", "-u", "-i", "-r", "-w"]
        try:
            done = subprocess.run(
                [*inside, *command], env=self.spec.env, timeout=timeout_s, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124
        return done.returncode

    def _process_1(self) -> int | None:
        """The host's number of the container's process 1: the child of `unshare`."""
        if self._inner is None:
            own = self._process.pid
            try:
                children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
            except OSError:
                return None
            self._inner = int(children[0]) if children else None
        return self._inner


def _start_script(spec: ContainerSpec, folder: Path, hosts: Path) -> str:
    root, quoted = folder / "root", shlex.quote
    layers = f"lowerdir=/,upperdir={folder / 'upper'},workdir={folder / 'work'}"
    lines = [
        "set -e",
        "mount --make-rprivate /",
        f"mount -t overlay overlay -o {quoted(layers)} {quoted(str(root))}",
        f"cd {quoted(str(root))}",
        "mount --rbind /dev dev",
        f"mount -t tmpfs -o size={SHM_MIB}m,mode=1777 tmpfs dev/shm",
        "mount -t proc proc proc",
        "mount --rbind /sys sys",
    ]
    for mount in spec.mounts:
        lines += _bound(mount)
    for code in (ROOT, Path(sys.base_prefix)):  # what an image would have
        lines += _bound(Mount(code, str(code), is_read_only=True))
        parents = [str(each).lstrip("/") for each in code.parents if str(each) != "/"]
        lines += [f"chmod a+rx {quoted(each)}" for each in parents]
    lines += [line for mount in IMAGE_MOUNTS for line in _bound(mount)]
    lines.append(f"mount --bind {quoted(str(hosts))} etc/hosts")
    if spec.security.get("readOnlyRootFilesystem"):
        lines.append(f"mount -o remount,ro {quoted(str(root))}")
    command = shlex.join(spec.argv)
    enter = f"cd {quoted(spec.working_dir)} && exec {command}"
    lines.append(f"exec chroot . {_privileges(spec)} bash -c {quoted(enter)}")
    return "\n".join(lines) + "\n"


def _bound(mount: Mount) -> list[str]:
    """Bind a source; the target's links (/var/run) are those of the container's own root."""
    source, target = shlex.quote(str(mount.source)), shlex.quote(mount.target)
    make = "mkdir -p" if mount.source.is_dir() else "install -D /dev/null"
    lines = [
        f"target=.$(chroot . realpath -m {target})",
        f'[ -e "$target" ] || {make} "$target"',
        f'mount --rbind {source} "$target"',
    ]
    if mount.is_read_only:
        lines.append('mount -o remount,bind,ro "$target" 2>/dev/null || true')
    return lines


def _privileges(spec: ContainerSpec) -> str:
    """`setpriv` with the user and the capabilities of the security context."""
    security = spec.security
    user, group = security.get("runAsUser", 0), security.get("runAsGroup", 0)
    options = ["setpriv", f"--reuid={user}", f"--regid={group}"]
    options.append("--clear-groups" if spec.fs_group is None else f"--groups={spec.fs_group}")
    if security.get("allowPrivilegeEscalation") is False:
        options.append("--no-new-privs")
    capabilities = security.get("capabilities", {})
    if "ALL" in capabilities.get("drop", []):
        added = "".join(f",+{each.lower()}" for each in capabilities.get("add", []))
        options += [f"--bounding-set=-all{added}", f"--inh-caps=-all{added}"]
    return " ".join(options)
