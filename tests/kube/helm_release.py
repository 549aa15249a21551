"""A release by Helm's own install, upgrade, rollback, test and uninstall, with its own history.

The control plane is 1.20.2. The chart that Helm gets is a copy in which the objects and fields that
1.20 lacks are switched off: disruption budgets (`policy/v1`), and the fields of `_UNKNOWN`. The
copy demands no version; nothing else is changed.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from helm_python import Chart, Config, HelmReleaseError

from tests.kube.api import Json
from tests.kube.cluster import Cluster
from tests.kube.release import CHART

TIMEOUT_S = 240
_LACKING = "templates/disruption-budgets.yaml"
_UNKNOWN = (
    r"^ *matchLabelKeys: .*\n",
    r"(?<=}}), endPort: {{.*?}}",
)


class HelmRelease:
    """One release in one namespace. Call `close`."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, folder: Path) -> None:
        """`folder` is an empty one for the copy of the chart."""
        self.cluster, self.namespace, self.name = cluster, namespace, name
        self._chart = Chart.load(fitting_chart(folder / "chart"))
        self._config = Config(
            kubeconfig_path=cluster.control_plane.write_kubeconfig(), namespace=namespace
        )

    def close(self) -> None:
        """Let go of Helm's handles; the release stays."""
        self._config.close()
        self._chart.close()

    def install(self, values: Json) -> None:
        """Install it, and wait until it runs."""
        self._config.install(self._chart, self.name, values, **self._options())

    def upgrade(self, values: Json) -> None:
        """Upgrade it, and wait until the rollout is over."""
        self._config.upgrade(self._chart, self.name, values, **self._options())

    def rollback(self) -> None:
        """Return to the revision before, and wait until the rollout is over."""
        self._config.rollback(self.name, timeout=TIMEOUT_S, wait="watcher")

    def run_tests(self) -> None:
        """Run the chart's tests. Raises AssertionError, with the pods' logs, if one fails."""
        try:
            self._config.test(self.name, timeout=TIMEOUT_S)
        except HelmReleaseError as error:
            logs = self.cluster.kubelet.log_of(self.namespace, self.name)
            raise AssertionError(f"{error}\n{logs}") from error

    def uninstall(self) -> None:
        """Remove it."""
        self._config.uninstall(self.name, timeout=TIMEOUT_S)

    def history(self) -> list[str]:
        """The state of each revision, the first one first."""
        return [str(each["status"]) for each in self._config.history(self.name)]

    def _options(self) -> dict[str, Any]:
        return {"namespace": self.namespace, "timeout": TIMEOUT_S, "wait": "watcher"}


def fitting_chart(folder: Path) -> Path:
    """A copy of the chart for an API server of 1.20, in `folder`, which must not exist."""
    shutil.copytree(CHART, folder)
    (folder / _LACKING).unlink()
    about = folder / "Chart.yaml"
    about.write_text(re.sub(r"^kubeVersion: .*\n", "", about.read_text(), flags=re.MULTILINE))
    found = set()
    for path in folder.rglob("templates/**/*"):
        if path.is_file():
            text = path.read_text()
            for pattern in _UNKNOWN:
                text, count = re.subn(pattern, "", text, flags=re.MULTILINE)
                found |= {pattern} if count else set()
            path.write_text(text)
    assert found == set(_UNKNOWN), "a field that 1.20 lacks is no longer where it was"
    return folder
