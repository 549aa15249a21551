"""NVIDIA Dynamo's frontend with its own mock engine: the peer of the router's benchmark.

Runs in its own environment, which you install beforehand, without etcd and NATS: discovery by
files, requests over TCP, events over ZeroMQ, KV-aware routing on. Owns its processes.
"""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path

import msgspec

from bench.router.mock_fleet import Usage, usage_of
from bench.tools.processes import Processes, free_port

HOW_TO_GET = """\
python3.11 -m venv DIR
DIR/bin/pip install ai-dynamo-runtime==1.6.1
DIR/bin/pip install --no-deps ai-dynamo==1.6.1
DIR/bin/pip install packaging pyyaml prometheus_client transformers msgspec aiohttp numpy pyzmq
then: --peer dynamo --peer-python DIR/bin/python"""
_START_S = 120.0
_PLANES = ("--discovery-backend=file", "--request-plane=tcp", "--event-plane=zmq")
_MOCKER = (
    "--speedup-ratio=1000000",
    "--num-gpu-blocks-override=1000000",
    "--max-num-seqs=4096",
    "--max-num-batched-tokens=1000000",
    "--block-size=16",
)


class DynamoPeer:
    """A context manager that runs the peer; within it `targets` has the frontend's address."""

    def __init__(self, python: str, model: Path, is_apart: bool) -> None:
        """`is_apart`: prefill and decode run on separate mock engines."""
        self.name = "dynamo apart" if is_apart else "dynamo"
        self.targets: list[tuple[str, int]] = []
        self.model_name = model.name
        self._python = python
        self._model = model
        self._modes = ("prefill", "decode") if is_apart else ("agg",)
        self._processes = Processes("dynamo-bench")

    def __enter__(self) -> DynamoPeer:
        port = free_port()
        try:
            flags = (f"--http-port={port}", "--http-host=127.0.0.1", "--router-mode=kv")
            self._start("frontend", "dynamo.frontend", *_PLANES, *flags)
            for mode in self._modes:
                model = (f"--model-path={self._model}", f"--model-name={self.model_name}")
                mocked = (*_MOCKER, *model, f"--disaggregation-mode={mode}")
                self._start(f"mocker-{mode}", "dynamo.mocker", *_PLANES, *mocked)
            self._wait_ready(port)
        except BaseException:
            self._processes.close()
            raise
        self.targets = [("127.0.0.1", port)]
        return self

    def __exit__(self, *exception: object) -> None:
        self._processes.close()

    def usage(self) -> Usage:
        """The usage of the frontend alone."""
        return usage_of([self._processes.pids["frontend"]])

    def _start(self, name: str, module: str, *flags: str) -> None:
        store = str(self._processes.folder / "store")
        environment = {"DYN_FILE_KV": store, "HF_HUB_OFFLINE": "1"}
        self._processes.start(name, [self._python, "-m", module, *flags], environment)

    def _wait_ready(self, port: int) -> None:
        """Wait until a request is answered. Raises RuntimeError with the logs."""
        deadline = time.monotonic() + _START_S
        message = {"role": "user", "content": "hello"}
        body = {"model": self.model_name, "messages": [message], "max_tokens": 1}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            msgspec.json.encode(body),
            {"content-type": "application/json"},
        )
        while time.monotonic() < deadline:
            if not all(map(self._processes.is_running, self._processes.pids)):
                break
            try:
                with urllib.request.urlopen(request, timeout=10):
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"Dynamo did not become ready:\n{self._processes.log_tails()}")
