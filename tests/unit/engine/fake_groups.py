"""`proc` and `sys` of a process in a control group, below a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class FakeGroups:
    """One hierarchy of groups, of version 1 or 2, with a controller."""

    controller: str

    def __init__(self, root: Path, group: str, mounted: str, is_v2: bool) -> None:
        """The process is in `group`; the hierarchy is mounted from its group `mounted` on."""
        self.root, self.is_v2 = root, is_v2
        self.mount = root / ("sys/fs/cgroup" if is_v2 else f"sys/fs/cgroup/{self.controller}")
        self.mount.mkdir(parents=True)
        others = ["5:cpuset,pids:/other", f"4:{self.controller},freezer:{group}", "0::/"]
        lines = [f"0::{group}"] if is_v2 else others
        kind = "cgroup2 cgroup2 rw" if is_v2 else f"cgroup cgroup rw,{self.controller},freezer"
        where = "/" + str(self.mount.relative_to(root))
        mounts = f"22 1 0:5 / /proc rw - proc proc rw\n30 23 0:26 {mounted} {where} ro - {kind}\n"
        folder = root / "proc/self"
        folder.mkdir(parents=True)
        (folder / "cgroup").write_text("\n".join(lines) + "\n")
        (folder / "mountinfo").write_text(mounts)

    def write(self, path: str, files: Mapping[str, object]) -> None:
        """Write the files of a group."""
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")
