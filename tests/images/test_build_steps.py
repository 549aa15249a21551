"""The build steps of the CPU image, outside of a container, in an empty environment.

What they install then serves, with the command of the compose file.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.images.dockerfiles import Dockerfile, environment, step_file
from tests.paths import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
PASSED = ("PIP_", "SSL_", "REQUESTS_", "http_proxy", "https_proxy", "no_proxy")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands for /opt of the image."""
    return tmp_path_factory.mktemp("image")


def empty_environment(place: Path) -> dict[str, str]:
    """Of a builder: a PATH and a HOME, and how pip reaches packages here."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
    python = Path(os.path.realpath(sys.executable)).parent
    return {"PATH": f"{python}:/usr/bin:/bin", "HOME": str(place)} | kept


def test_the_steps_install_what_serves(place: Path) -> None:
    dockerfile = Dockerfile.read("cpu")
    environ = empty_environment(place)
    run = []
    for command in dockerfile.steps():
        if command[0] == "/steps/system-packages":
            continue  # changes the host; test_system_packages_exist
        mapped = [
            part.replace("/opt/baton", f"{place}/baton").replace("/source", str(ROOT))
            for part in command[1:]
        ]
        subprocess.run([step_file(command), *mapped], env=environ, cwd=place, check=True)
        run.append(command[0])
    assert run == ["/steps/install", "/steps/kernels", "/steps/launcher", "/steps/check"]
    serve_and_check(place, dockerfile)


def serve_and_check(place: Path, dockerfile: Dockerfile) -> None:
    """Run the compose file's command and send a chat through both workers."""
    image = {
        name: value.replace("/opt/baton", f"{place}/baton").replace("$PATH", "/usr/bin:/bin")
        for name, value in environment(dockerfile).items()
    }
    image |= {"HOME": str(place), "BATON_MODEL": str(ROOT / "demo_model"), "BATON_DEVICE": "cpu"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["baton"]
    baton = f"{place}/baton/bin/baton"
    fleet = subprocess.Popen([baton, *service["command"], f"--port={port}"], env=image, cwd=place)
    try:
        url = f"--router-url=http://127.0.0.1:{port}"
        check = [baton, "check", url, "--both-pools", "--wait-s=300"]
        subprocess.run(check, env=image, cwd=place, check=True)
    finally:
        fleet.send_signal(signal.SIGTERM)
        assert fleet.wait(120) == 0


def test_system_packages_exist() -> None:
    """As far as this host's package lists go: those of Debian, not those of NVIDIA."""
    for name in ("g++", "tini", "python3-venv", "python3-dev", "ninja-build"):
        shown = subprocess.run(
            ["apt-cache", "policy", name], capture_output=True, text=True, check=False
        )
        if shown.returncode or not shown.stdout:
            pytest.skip("apt has no package lists here")
        assert "Candidate: (none)" not in shown.stdout, name
