"""Prometheus's programs, and a server that scrapes a fleet under test and evaluates rules."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.http_client import HTTP
from tests.integration.fleets import wait_for
from tests.programs import find_program

START_S = 60.0
STOP_S = 60.0
_LISTENING = re.compile(r'msg="Listening on" address=(\S+)')


class Prometheus:
    """A running server, seen through its HTTP API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query. Fails the test if Prometheus refuses it."""
        return list(self._get("query", query=expression)["result"])

    def targets(self) -> dict[str, str]:
        """The health of each scraped pod: `up`, `down` or `unknown`."""
        active = self._get("targets")["activeTargets"]
        return {each["labels"]["pod"]: each["health"] for each in active}

    def rules(self) -> dict[str, dict[str, Any]]:
        """Every rule by its name, with `health`, `lastError`, `state` and `lastEvaluation`."""
        groups = self._get("rules")["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        answer = HTTP.get(f"{self._url}/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return dict(answer["data"])


@contextmanager
def running_prometheus(
    folder: Path,
    addresses: Mapping[str, str],
    rules: Path,
    labels: Mapping[str, str],
    key: str | None = None,
) -> Iterator[Prometheus]:
    """A server that scrapes `addresses` (host:port by pod) each second, with `key` if there is one,
    and evaluates `rules`. Every target has `labels`; a pod named `router` is a router. Data and log
    lie in `folder`."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "baton",
                **({"authorization": {"credentials": key}} if key else {}),
                "static_configs": [
                    {
                        "targets": [address],
                        "labels": {
                            **labels,
                            "pod": pod,
                            "component": "router" if pod == "router" else "worker",
                        },
                    }
                    for pod, address in addresses.items()
                ],
            }
        ],
    }
    config_path, log_path = folder / "prometheus.yml", folder / "prometheus.log"
    config_path.write_text(json.dumps(config))  # JSON is YAML
    command = [
        find_program("prometheus", "prometheus"), f"--config.file={config_path}",
        f"--storage.tsdb.path={folder / 'data'}", "--web.listen-address=127.0.0.1:0",
        "--log.format=logfmt",
    ]  # fmt: skip
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Prometheus(_ready_url(process, log_path))
    except BaseException:
        print(log_path.read_text())
        raise
    finally:
        process.terminate()
        process.wait(STOP_S)


def _ready_url(process: subprocess.Popen[bytes], log_path: Path) -> str:
    def find() -> str | None:
        assert process.poll() is None, "Prometheus ended at once"
        found = _LISTENING.search(log_path.read_text())
        url = f"http://{found[1]}" if found else ""
        return url if url and HTTP.get(f"{url}/-/ready").status_code == 200 else None

    return wait_for("Prometheus", find, START_S)
