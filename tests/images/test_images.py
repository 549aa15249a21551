"""Dockerfiles, compose file and build script: pinned, small, not root, and made of tested steps."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.commands import settings_classes
from cli.up_settings import UpSettings
from process.settings import load_settings
from process.settings.spec import specs_of
from tests.effort import some
from tests.images.dockerfiles import DOCKER, KINDS, Dockerfile, environment, step_file
from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(params=KINDS)
def dockerfile(request: pytest.FixtureRequest) -> Dockerfile:
    return Dockerfile.read(request.param)


def test_every_step_is_a_script_that_can_run(dockerfile: Dockerfile) -> None:
    steps = dockerfile.steps()
    assert len(steps) >= 4
    for command in steps:
        assert command[0].startswith("/steps/")
        assert os.access(step_file(command), os.X_OK)
        subprocess.run(["sh", "-n", step_file(command)], check=True)


@pytest.mark.parametrize("cards", ["", *some(["8.0 9.0a", "9.0a"], 1)])
def test_gpu_kernels_are_compiled_for_the_named_cards_and_installed(
    cards: str, tmp_path: Path
) -> None:
    """Python is a script that names the kernels, instead of compiling them, and says how it was
    called."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nprintf "[%s]" "$@"\necho\nexec {sys.executable} "$@" --list\n')
    python.chmod(0o700)
    command = [DOCKER / "steps" / "gpu-kernels", tmp_path, cards]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    called, *named = done.stdout.splitlines() or [""]
    assert ("[--install]" in called) is bool(cards)
    assert called.endswith("".join(f"[{each}]" for each in cards.split()))
    assert {each.partition("  ")[0] for each in named} == ({cards} if cards else set())
    kinds = {each.partition("  ")[2].partition(":")[0] for each in named}
    assert kinds == ({"fa2", "fa3", "decode"} if cards else set())


def test_images_are_pinned_have_two_stages_and_do_not_run_as_root(dockerfile: Dockerfile) -> None:
    bases = dockerfile.all("FROM")
    assert len(bases) == 2
    for base in bases:
        assert re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+-[\w.-]+( AS build)?", base)
    uid, gid = dockerfile.all("USER")[-1].split(":")
    assert int(uid) > 0
    assert int(gid) > 0
    after = [word for word, _ in dockerfile.instructions]
    assert "COPY" not in after[after.index("USER") :]


def test_variables_of_the_images_are_settings(dockerfile: Dockerfile) -> None:
    known = {spec.env_name for cls in settings_classes() for spec in specs_of(cls).values()}
    ours = {name for name in environment(dockerfile) if name.startswith("BATON_")}
    assert ours
    assert ours <= known


def test_the_context_holds_the_package_and_nothing_else(dockerfile: Dockerfile) -> None:
    lines = (DOCKER / f"Dockerfile.{dockerfile.kind}.dockerignore").read_text().splitlines()
    assert "*" in lines
    kept = {line[1:] for line in lines if line.startswith("!")}
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {*wheel["only-include"], *wheel["force-include"]}
    files = {"pyproject.toml", "constraints.txt", PROJECT["project"]["readme"], "LICENSE"}
    assert kept == packages | files | {"deploy/docker/steps"}
    for copied in dockerfile.all("COPY"):
        source = copied.split()[0]
        assert source in kept | {".", "--from=build"}


def build(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "DOCKER": "echo"}
    return subprocess.run(
        [DOCKER / "build", *arguments],
        env=environ,
        cwd="/",
        text=True,
        capture_output=True,
        check=False,
    )


def test_the_build_script_names_the_image_as_the_chart_expects_it() -> None:
    version = PROJECT["project"]["version"]
    command = f"build --file deploy/docker/Dockerfile.cuda --tag baton:{version}-cuda ."
    assert build("cuda").stdout.strip() == command
    assert "--tag registry/b:1 ." in build("cpu", "registry/b:1").stdout
    wrong = build("rocm")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    return found["services"]["baton"]


def test_compose_runs_up_with_settings_that_it_knows() -> None:
    service = compose()
    command, *flags = service["command"]
    assert command == "up"
    variables = {name: default(value) for name, value in service["environment"].items()}
    settings = load_settings(
        UpSettings,
        flags,
        prog="up",
        description="",
        section="up",
        known=settings_classes(),
        environ=environment(Dockerfile.read("cpu")) | variables,
    )
    assert (settings.model, settings.log_to) == ("/opt/baton/demo_model", "stdout")
    assert service["image"] == f"baton:{PROJECT['project']['version']}-cpu"
    seconds = int(service["stop_grace_period"].removesuffix("s"))
    assert seconds > settings.stop_grace_s


def default(value: str) -> str:
    """What compose puts in for `${NAME:-value}` without the variable."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def test_compose_gives_the_container_no_more_than_it_needs() -> None:
    service = compose()
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    context = ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]
    assert Path(context).resolve() == DOCKER / "Dockerfile.cpu"


def test_compose_asks_the_routers_health_without_a_proxy() -> None:
    kind, program, *arguments = compose()["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    proxies = {"http_proxy": "http://127.0.0.1:1", "HTTP_PROXY": "http://127.0.0.1:1"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = arguments[-1].replace(":8000/", f":{server.getsockname()[1]}/")
        command = [sys.executable, *arguments[:-1], text]
        with subprocess.Popen(command, env=os.environ | proxies | {"no_proxy": ""}) as asking:
            server.settimeout(60)
            with server.accept()[0] as link:
                assert link.recv(4096).startswith(b"GET /health HTTP/1.1")
                link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            assert asking.wait(60) == 0


def test_nothing_unchecked_and_no_secret_gets_into_an_image(dockerfile: Dockerfile) -> None:
    """Packages come through package managers, which check them; secrets come at run time."""
    assert dockerfile.all("ADD") == []
    for command in dockerfile.steps():
        script = step_file(command).read_text()
        assert not re.search(r"\b(curl|wget)\b|trusted-host|--allow-unauth|verify=False", script)
    given = " ".join(dockerfile.all("ARG") + dockerfile.all("ENV"))
    assert not re.search("secret|password|token|api_?key", given, re.IGNORECASE)
    assert not re.search("secret|password|token|api_?key", str(compose()), re.IGNORECASE)
