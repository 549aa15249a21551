"""`baton kube-secret`: secrets are made once, completed, and never changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from cli.main import main
from cli.pods.kube_secret import PARTS
from cli.pods.store_settings import PASSWORD_PATTERN
from gateway.admission.api_keys import KEY_PATTERN
from process.settings.spec import specs_of
from tests.unit.cli.pods.api_server import SecretsServer, secrets_server
from worker.settings import WorkerSettings

NAME = "demo-secrets"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SecretsServer]:
    with secrets_server(tmp_path) as running:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(running.server_port))
        yield running


@pytest.fixture
def run(tmp_path: Path) -> Callable[[], int]:
    return lambda: main(["kube-secret", f"--secret-name={NAME}", f"--account-dir={tmp_path}"])


def test_all_parts_are_made_and_accepted_by_the_processes(server, run) -> None:
    assert run() == 0
    made = server.secrets[NAME]
    assert set(made) == set(PARTS)
    assert re.fullmatch(KEY_PATTERN, made["api-keys"])
    assert re.fullmatch(KEY_PATTERN, made["admin-keys"])
    assert re.fullmatch(KEY_PATTERN, made["viewer-keys"])
    assert re.fullmatch(PASSWORD_PATTERN, made["store-password"])
    assert specs_of(WorkerSettings)["cluster_secret"].parse_text(made["cluster-secret"])
    assert len(set(made.values())) == len(made)


def test_a_second_run_changes_nothing(server, run, capsys) -> None:
    run()
    first = dict(server.secrets[NAME])
    server.calls.clear()
    assert run() == 0
    assert server.secrets[NAME] == first
    assert server.calls == ["GET"]
    assert "complete" in capsys.readouterr().out


def test_only_what_is_missing_is_added(server, run, capsys) -> None:
    server.secrets[NAME] = {"cluster-secret": "kept", "other": "kept too", "api-keys": ""}
    assert run() == 0
    found = server.secrets[NAME]
    assert (found["cluster-secret"], found["other"]) == ("kept", "kept too")
    assert set(found) == {*PARTS, "other"}
    assert all(found.values())
    assert "made store-password, api-keys, admin-keys, viewer-keys" in capsys.readouterr().out


def test_of_two_that_create_the_first_holds(server, run) -> None:
    server.rival = dict.fromkeys(PARTS, "of the rival")
    assert run() == 0
    assert server.secrets[NAME] == server.rival


@pytest.mark.parametrize("verb", ["GET", "POST", "PATCH"])
def test_a_right_that_is_missing_is_named(verb, server, run, capsys) -> None:
    server.verbs.remove(verb)
    if verb == "PATCH":
        server.secrets[NAME] = {"cluster-secret": "kept"}
    assert run() == 1
    assert f"Secret {NAME}: 403 secrets is forbidden" in capsys.readouterr().err


def test_a_server_with_another_certificate_gets_no_token(server, run, tmp_path, capsys) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    assert run() == 1
    assert "certificate verify failed" in capsys.readouterr().err
    assert server.calls == []


def test_outside_of_a_pod_the_error_says_so(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["kube-secret", f"--secret-name={NAME}", f"--account-dir={tmp_path}"]) == 2
    assert "runs in a pod" in capsys.readouterr().err
