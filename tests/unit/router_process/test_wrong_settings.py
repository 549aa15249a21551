"""What an operator gets wrong ends `baton router` with one line; `--help` names every setting."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from process.store.embedded_valkey import EmbeddedValkey
from router_process.main import main
from tests.unit.router.fake_worker import SECRET, WAIT_S
from tests.unit.router_process.running_router import fork

GOOD = {"BATON_REDIS_URL": "redis://127.0.0.1:1", "BATON_CLUSTER_SECRET": SECRET}


def exit_status(*flags: str) -> object:
    """Of the command, which runs in this process: so many imports would cost their time."""
    try:
        return main(flags)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("flags", "environment", "told"),
    [
        ((), {}, "redis_url is required"),
        ((), {"BATON_REDIS_URL": "redis://127.0.0.1:1"}, "cluster_secret is required"),
        (("--prot=1",), GOOD, "flag --prot: unknown; did you mean --port?"),
        (("--model=/no/such/folder",), GOOD, "there is no folder"),
        (("--model=/", "--port=0"), GOOD, "tokenizer.json is missing"),
    ],
)
def test_what_an_operator_gets_wrong_is_one_line(
    checkpoint: Path,
    flags: tuple[str, ...],
    environment: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("router_process.main.setup_logs", lambda *arguments: None)
    for name, value in ({"BATON_MODEL": str(checkpoint)} | environment).items():
        monkeypatch.setenv(name, value)
    assert exit_status(*flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("baton router: ")
    assert told in line


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--port-file=/no/such/file", "--port=0"), "port file /no/such/file cannot be written"),
        (("--port={taken}",), "127.0.0.1 port {taken}: "),
    ],
)
async def test_what_is_wrong_with_its_port_ends_the_process_with_one_line(
    tmp_path: Path, checkpoint: Path, flags: tuple[str, ...], told: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        given = [each.format(taken=taken) for each in flags]
        process = fork(tmp_path / "log", f"--model={checkpoint}", *given, **GOOD)
        assert await asyncio.to_thread(process.wait, WAIT_S)
    assert process.exit_status() == 2
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[-1].startswith("baton router: ")
    assert told.format(taken=taken) in lines[-1]
    assert not any("Traceback" in line for line in lines)


async def test_a_store_that_refuses_the_password_ends_the_process_with_one_line(
    valkey: EmbeddedValkey, checkpoint: Path, tmp_path: Path
) -> None:
    log, where = tmp_path / "log", f"127.0.0.1:{valkey.port}"
    process = fork(
        log, f"--model={checkpoint}", "--port=0", BATON_CLUSTER_SECRET=SECRET,
        BATON_REDIS_URL=f"redis://:no-password@{where}",
    )  # fmt: skip
    assert await asyncio.to_thread(process.wait, WAIT_S), log.read_text()
    assert process.exit_status() == 2
    *_, last = log.read_text().splitlines()
    assert last.startswith(f"baton router: redis_url redis://{where}: the store refuses it")
    assert "Traceback" not in log.read_text()
    assert "no-password" not in log.read_text()


async def test_help_names_every_setting_with_its_unit_and_needs_no_torch() -> None:
    code = "import sys; from router_process.main import main; assert 'torch' not in sys.modules; "
    code += "main(['--help'])"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    shown, _ = await process.communicate()
    text = " ".join(shown.decode().split())
    assert process.returncode == 0
    assert "--local-prefill-threshold-tokens TOKENS" in text
    assert "env: BATON_RETRY_BACKOFF_MS" in text
