"""Fleets whose workers a test can hold at exact points, stop, kill and revive."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from cli.child import Child
from cli.fleet import Fleet
from cli.up_settings import UpSettings
from protocol.messages import Role
from tests.faults.armed_points import ArmedPoints
from tests.faults.faulty_worker import FAULTS_DIR
from tests.forked import ROOT, ForkedChildren
from tests.http_client import HTTP
from tests.integration.fleets import (
    PAUSE,
    POLL_S,
    PROMPT_REPORTS,
    SETTINGS,
    assert_idle,
    assert_no_other_processes,
    complete,
    logs_on_failure,
    our_processes,
    segments_of,
    wait_for,
    workers,
)
from tests.integration.reference import DEMO_MODEL

LEASE_S = "4"
"""Longer than a busy machine keeps a process waiting, but tests wait for leases of the dead."""
TRIES = 12
"""Streams of which one is fetched."""
PAUSE_S = 0.2
"""What the others get between two steps of a worker that runs one by one."""


class FaultyFleet(ArmedPoints):
    """A running fleet and the folder that arms its fault points."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        super().__init__(folder)
        self.fleet = fleet

    @property
    def url(self) -> str:
        """The router's."""
        return self.fleet.url

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the processes that run now, by name."""
        return {name: child.pid for name, child in self.fleet.processes.items()}

    def names(self, role: Role) -> list[str]:
        """The names of the running workers of a role."""
        children = self.fleet.processes.values()
        return [each.name for each in children if each.role is role and each.is_running()]

    def move_on(self, name: str, point: str, passes: int) -> None:
        """Let a held worker go on to the `passes`th time that it passes the point since it was
        armed, where it is held again."""
        self.arm([name], point, passes)
        reached = self._folder / f"{name}.{point}.reached"
        wait_for(
            f"{name} to reach {point} for the {passes}th time",
            lambda: _text(reached) == str(passes),
        )

    def heard(self, name: str) -> Counter[str]:
        """The number of messages of each kind that came to a worker since its loop has been
        held."""
        return Counter(_text(self._folder / f"{name}.heard").split())

    def wait_heard(self, name: str, *kinds: str) -> set[str]:
        """Wait until a message of one of these kinds has come to a worker whose loop is held."""
        return wait_for(f"{name} to hear {kinds}", lambda: self.heard(name).keys() & set(kinds))

    def compute_until_granted(self, name: str) -> None:
        """Let a worker that is held after a prompt's first chunk compute one chunk after the other
        until it has been granted blocks, which it reads when it goes on. Peers that do not know
        each other yet begin with a Hello."""
        chunk = 1
        while "KvGrant" not in self.wait_heard(name, "Hello", "KvAsk", "KvGrant"):
            chunk += 1
            self.move_on(name, "chunk", chunk)

    def step_until(self, name: str, first: int, last: int, condition: Callable[[], object]) -> int:
        """Let a worker that is held after a decode step run step after step until the condition
        holds, and then release it. Returns the number of the last step that may have run. Other
        processes get time between two steps."""
        for step in range(first, last + 1):
            self.arm([name], "decode", step)
            reached = self._folder / f"{name}.decode.reached"
            wait_for(
                f"{name} to run step {step}",
                lambda step=step, reached=reached: condition() or _text(reached) == str(step),
            )
            until = time.monotonic() + PAUSE_S
            while time.monotonic() < until:
                if condition():
                    self.release(name, "decode")
                    return step
                PAUSE.wait(POLL_S)
        raise AssertionError(f"{name} still ran after step {last}")

    def release_all(self) -> None:
        """Disarm all points, and let all held and stopped workers continue."""
        for path in self._folder.iterdir():
            path.unlink(missing_ok=True)
        for name in self.fleet.processes:
            self.signal(name, signal.SIGCONT)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a worker."""
        self.fleet.processes[name].signal(number)

    def kill(self, *names: str) -> None:
        """SIGKILL to all of them at once; wait until they have ended, and disarm them."""
        for name in names:
            self.signal(name, signal.SIGKILL)
        for name in names:
            assert self.fleet.processes[name].wait(60)
            for path in self._folder.glob(f"{name}.*"):
                path.unlink()

    def revive(self) -> None:
        """Restart the processes that have ended, and wait until the router uses every worker."""
        self.release_all()
        children = [c for c in self.fleet.processes.values() if c.role is not Role.ROUTER]
        for child in children:
            if not child.is_running():
                child.start()
        for child in children:
            wait_for(f"{child.name} to serve", lambda child=child: self.serves(child), 120)

    def serves(self, child: Child) -> bool:
        """Whether the router uses this life of a worker."""
        shown = workers(self.fleet).get(child.name)
        ready = shown is not None and shown["pid"] == child.pid and shown["connected"]
        return ready and shown["state"] == "ready"

    def is_known(self, name: str) -> bool:
        """Whether the router lists a worker."""
        return name in workers(self.fleet)

    def attempts(self, request_id: str) -> list[dict[str, Any]]:
        """The attempts of a finished request, from its trace."""
        url = f"{self.url}/requests/{request_id}/trace"
        attempts: list[dict[str, Any]] = HTTP.get(url).raise_for_status().json()["attempts"]
        return attempts


@contextmanager
def faulty_fleet(
    environment: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[FaultyFleet]:
    """As `running_fleet`; whatever was killed must have been revived at the end.

    Tests of faults that meet blocks on their way name the `transport`: NIXL and shared memory both,
    or NIXL alone and both nightly. The others take the default, shared memory.

    `environment` reaches its processes, for settings that `baton up` has not.
    """
    defaults = SETTINGS | {"chunk_max_tokens": 64, "local_prefill_threshold_tokens": 0}
    before = our_processes()
    with tempfile.TemporaryDirectory() as folder:
        known = UpSettings(**(defaults | settings))
        env = {**os.environ, **PROMPT_REPORTS, FAULTS_DIR: folder, "PYTHONPATH": str(ROOT)}
        env |= {"BATON_LEASE_S": LEASE_S} | dict(environment or {})
        module = "tests.faults.faulty_worker"
        children = ForkedChildren(known, frozenset(defaults | settings), env, module=module)
        with Fleet(known, children) as fleet, logs_on_failure(fleet):
            faulty = FaultyFleet(fleet, Path(folder))
            try:
                yield faulty
            finally:
                faulty.release_all()
            faulty.revive()
            assert_idle(fleet)
            segments = segments_of(fleet)
            fleet.stop()
            exits = {name: child.exit_status() for name, child in fleet.processes.items()}
            assert exits == dict.fromkeys(exits, 0), "a process did not stop in order"
    assert_no_other_processes(before)
    assert not [path for path in segments if path.exists()], "shared memory was left behind"


class Stream:
    """A client that reads a streamed completion in a thread of its own."""

    def __init__(
        self,
        url: str,
        prompt: list[int] | list[list[int]],
        max_tokens: int,
        last_id: str = "",
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        """With the `last_id` of a stream that broke off, read the rest of that stream. If there are
        several prompts, `choices` has the tokens of each."""
        self.last_id = last_id
        self._headers = {"accept": "text/event-stream", **(headers or {})}
        if last_id:
            self._headers["Last-Event-ID"] = last_id
        self.tokens: list[int] = []
        self.choices: defaultdict[int, list[int]] = defaultdict(list)
        self.text = ""
        self.events = 0
        self.request_id = ""
        self.error: str | None = None
        self._next_id = ""
        self.finish: str | None = None
        body = {
            "model": DEMO_MODEL.name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            **fields,
        }
        self._thread = threading.Thread(target=self._read, args=(url, body), daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the stream has ended."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float = 60.0) -> Stream:
        """Wait until the stream has ended."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the stream hangs after {len(self.tokens)} tokens"
        return self

    def wait_tokens(self, number: int) -> None:
        """Wait until so many tokens have come."""
        wait_for(f"{number} tokens", lambda: len(self.tokens) >= number or self.error)
        assert self.error is None

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with HTTP.stream(
                "POST", f"{url}/v1/completions", json=body, timeout=60, headers=self._headers
            ) as answer:
                if answer.status_code != 200:
                    answer.read()
                    self.error = f"{answer.status_code} {answer.text}"
                    return
                for line in answer.iter_lines():
                    if line.startswith("id: "):
                        self._next_id = line.removeprefix("id: ")
                    if line.startswith("data: ") and line != "data: [DONE]":
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.error = repr(error)

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]["message"]
            return
        self.events += 1
        self.last_id = self._next_id
        self.request_id = event["id"]
        for choice in event["choices"]:
            self.tokens += choice["token_ids"]
            self.choices[choice["index"]] += choice["token_ids"]
            self.text += choice["text"]
            self.finish = choice["finish_reason"] or self.finish


def fetch_held_at(
    fleet: FaultyFleet, point: str, prompt: list[int], max_tokens: int, **fields: Any
) -> tuple[Stream, str]:
    """A stream whose prompt is being fetched, and the holder of the prompt, which is held at this
    point. Sooner or later, load sends a prompt to a worker that lacks it."""
    complete(fleet.fleet, prompt, max_tokens=1, **fields)
    fleet.arm([*fleet.names(Role.PREFILL), *fleet.names(Role.DECODE)], point)
    for _ in range(TRIES):
        stream = Stream(fleet.url, prompt, max_tokens, **fields)
        while not stream.is_over:
            if fleet.is_any_held(point):
                return stream, fleet.held(point)
            PAUSE.wait(POLL_S)
        stream.wait()
    raise AssertionError("nobody fetched")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


def is_stopped(pid: int) -> bool:
    """Whether a process stands still after SIGSTOP."""
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED
